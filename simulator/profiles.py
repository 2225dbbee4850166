"""Hardware and models as data: how fast, how big, how connected. Each number has its source beside it.

*Published* is what a vendor or the vLLM x Mooncake report (vllm.ai, 2026-05-06) says; *derived* follows from
that by arithmetic that is shown; *fitted* was chosen so that one published figure comes out; *assumed* is
neither, and is named as such. docs/simulation.md explains each.
"""

from __future__ import annotations

from dataclasses import dataclass

from moongate.router.model import Role
from moongate.simulator.batching import EngineShape
from moongate.simulator.network import NetworkShape
from moongate.simulator.step_timing import StepTiming

GB = 1e9


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """One kind of instance."""

    role: Role
    gpus: int
    timing: StepTiming
    kv_tokens: int  # that its accelerators have room for
    kv_bytes_per_token: float  # of one copy
    load_bytes_per_token: float  # on the way into it: as many copies as it keeps
    sequences_max: int
    batch_tokens_max: int

    def engine(self, block_tokens: int) -> EngineShape:
        return EngineShape(
            blocks=self.kv_tokens // block_tokens,
            block_tokens=block_tokens,
            timing=self.timing,
            sequences_max=self.sequences_max,
            batch_tokens_max=self.batch_tokens_max,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of fleet: groups of instances on nodes of their own, and what connects them."""

    name: str
    group: tuple[InstanceShape, ...]  # what one group consists of, each on a node of its own
    network: NetworkShape
    pool_bytes_per_instance: float  # memory that each instance's node gives to the pool
    prompt_tokens_max: int
    prefill_tokens_per_s: float  # told to the router at its start, as an operator would

    @property
    def gpus(self) -> int:
        """Return the accelerators of a group."""
        return sum(shape.gpus for shape in self.group)


# --- Kimi K2.5 in NVFP4 on GB200: the report's set-up ---------------------------------------------

KIMI_KV_BYTES = 38_000.0
"""Published: 3.8 GB for 100 K tokens of Kimi 2.5 with FP8 KV. (61 layers x 576 = 35,136, and what is
beside it.)"""

GB200_KIMI_PREFILL = InstanceShape(
    role=Role.PREFILL,
    gpus=4,  # published: TP4
    timing=StepTiming(
        overhead_ms=10.0,  # assumed
        # Fitted, both by one factor: 32 K tokens in 0.75 s (a transfer of 31.65 ms is 4.2 % of the time
        # to the first token). Their ratio is derived: 64 GFLOP a token for 32 G active parameters at FP4
        # rates, 2.5 MFLOP for a token and one before it (61 layers, 64 heads, 192 + 128) at BF16's, a
        # quarter of those.
        prefill_token_us=8.0,
        prefill_context_ns=0.92,
    ),
    # Derived: 186 GB x 0.9 a GPU, a quarter of 591 GB of weights, 4 GB for activations: 15.6 GB; latent
    # KV is the same on all four.
    kv_tokens=410_000,
    kv_bytes_per_token=KIMI_KV_BYTES,
    load_bytes_per_token=140_500.0,  # published: 4.5 GB for 32 K tokens; one copy for each of TP4
    sequences_max=256,  # assumed
    batch_tokens_max=16_384,  # assumed
)

GB200_KIMI_DECODE = InstanceShape(
    role=Role.DECODE,
    gpus=8,  # published: DP8 with expert parallelism
    timing=StepTiming(
        overhead_ms=3.0,  # assumed
        # Assumed for a prompt that is computed there: half the speed of twice the GPUs.
        prefill_token_us=8.0,
        prefill_context_ns=0.92,
        weights_ms=9.0,  # derived: 74 GB of experts a GPU at 8 TB/s
        # Derived: the eight share the sequences; a token's experts and projections.
        sequence_us=25.0,
        # Derived: 38 KB a token of context over 8 x 8 TB/s at half of the peak.
        decode_context_ns=1.2,
    ),
    kv_tokens=14_700_000,  # derived: 8 x (186 GB x 0.9 - 591 / 8 - 24) / 38 KB
    kv_bytes_per_token=KIMI_KV_BYTES,
    load_bytes_per_token=KIMI_KV_BYTES,
    sequences_max=1024,  # assumed
    batch_tokens_max=8192,  # assumed
)

RDMA_GB200 = NetworkShape(
    node_bytes_per_s=142 * GB,  # published, for the transfer engine
    memory_bytes_per_s=200 * GB,  # assumed: NVLink-C2C, 450 GB/s for two GPUs, shared with others
    stream_bytes_per_s=50 * GB,  # one interface of 400 Gbit/s: a decode rank's
)

NVLINK_GB200 = NetworkShape(
    node_bytes_per_s=4 * 900 * GB,  # published: 1.8 TB/s a GPU, half of it each way
    memory_bytes_per_s=200 * GB,
    stream_bytes_per_s=900 * GB,
)

GB200_KIMI = Profile(
    name="gb200-kimi",
    group=(GB200_KIMI_PREFILL, GB200_KIMI_DECODE),
    network=RDMA_GB200,
    pool_bytes_per_instance=500 * GB,  # assumed: about half of a compute tray's 960 GB LPDDR5X
    prompt_tokens_max=256_000,  # published: the model's context
    prefill_tokens_per_s=40_000.0,
)

# --- a 70 B model on an H200 ----------------------------------------------------------------------

LLAMA70_KV_BYTES = 163_840.0
"""Derived: 80 layers x 8 KV heads x 128 x 2 in FP8."""

H200_LLAMA70 = Profile(
    name="h200-70b",
    group=(
        InstanceShape(
            role=Role.BOTH,
            gpus=2,
            timing=StepTiming(
                overhead_ms=5.0,  # assumed
                # Derived: 140 GFLOP a token; 2 x 1.98 PFLOP/s in FP8 at 45 % (assumed).
                prefill_token_us=79.0,
                # Derived: 80 layers x 64 heads x 128 x 4 FLOP, BF16, at 40 % of 2 x 0.99 PFLOP/s.
                prefill_context_ns=3.3,
                weights_ms=10.0,  # derived: 70 GB over 2 x 4.8 TB/s at 75 %
                sequence_us=60.0,  # assumed
                decode_context_ns=23.0,  # derived: 163,840 B over 9.6 TB/s at 75 %
            ),
            kv_tokens=1_000_000,  # derived: 2 x 141 GB x 0.9 - 70 - 20 GB
            kv_bytes_per_token=LLAMA70_KV_BYTES,
            load_bytes_per_token=LLAMA70_KV_BYTES,  # its heads are split: one copy in all
            sequences_max=256,
            batch_tokens_max=8192,
        ),
    ),
    # Derived: 71 % of two interfaces of 400 Gbit/s (142 of 200 GB/s are published for four), PCIe 5 x16.
    network=NetworkShape(71 * GB, 71 * GB, 71 * GB),
    pool_bytes_per_instance=400 * GB,  # assumed: of 2 TB for eight GPUs
    prompt_tokens_max=131_072,
    prefill_tokens_per_s=11_000.0,
)

# --- an 8 B model on an A10 -----------------------------------------------------------------------

A10_8B = Profile(
    name="a10-8b",
    group=(
        InstanceShape(
            role=Role.BOTH,
            gpus=1,
            timing=StepTiming(
                overhead_ms=4.0,  # assumed
                # Derived: 16 GFLOP a token at 125 TFLOP/s, 45 % of it (assumed).
                prefill_token_us=284.0,
                prefill_context_ns=10.0,  # derived: 32 layers x 32 heads x 128 x 4 FLOP at 42 %
                weights_ms=35.0,  # derived: 16 GB at 600 GB/s, 75 % of it
                sequence_us=100.0,  # assumed
                decode_context_ns=290.0,  # derived: 131,072 B at 450 GB/s
            ),
            kv_tokens=40_000,  # derived: 24 GB x 0.92 - 16 - 0.8 GB
            kv_bytes_per_token=131_072.0,
            load_bytes_per_token=131_072.0,
            sequences_max=128,
            batch_tokens_max=2048,
        ),
    ),
    network=NetworkShape(3.1 * GB, 12 * GB, 3.1 * GB),  # 25 Gbit/s; PCIe 4 x16
    pool_bytes_per_instance=64 * GB,  # assumed
    prompt_tokens_max=32_768,
    prefill_tokens_per_s=3_000.0,
)

# --- the tiny test model on one core of this machine ----------------------------------------------

CPU_TINY = Profile(
    name="cpu-tiny",
    group=(
        InstanceShape(
            role=Role.BOTH,
            gpus=0,
            # Fitted to 250 prompts of 20 to 2,400 tokens on a real engine (`tests/e2e/test_likeness.py`);
            # the other 250 were then 12.3 % off at the median.
            timing=StepTiming(
                overhead_ms=9.1,
                prefill_token_us=10.0,
                prefill_context_ns=18.2,
                weights_ms=2.0,  # assumed: answers aren't compared
            ),
            kv_tokens=159 * 32,  # as there
            kv_bytes_per_token=1_024.0,  # derived: 2 layers x 2 KV heads x 32 x 2 in FP32
            load_bytes_per_token=1_024.0,
            sequences_max=256,
            batch_tokens_max=2048,
        ),
    ),
    network=NetworkShape(1 * GB, 4 * GB, 1 * GB),  # assumed: loopback
    pool_bytes_per_instance=0.5 * GB,
    prompt_tokens_max=4_000,
    prefill_tokens_per_s=30_000.0,
)

PROFILES = {profile.name: profile for profile in (GB200_KIMI, H200_LLAMA70, A10_8B, CPU_TINY)}

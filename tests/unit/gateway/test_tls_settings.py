"""Certificates and keys that can't be used are told when the configuration is checked, by name."""

from pathlib import Path
from typing import Any

import pytest
from certificates import Files, make_files
from cryptography.hazmat.primitives import serialization

from moongate import cli
from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import SettingsError, parse_settings


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return make_files(tmp_path / "one")


@pytest.fixture
def others(tmp_path: Path) -> Files:
    return make_files(tmp_path / "other")


def listening(**tls: Any) -> Settings:
    return Settings.model_validate({"listen": {"tls": tls}, "instances": []})


def calling(url: str = "https://h:1", **tls: Any) -> Settings:
    return Settings.model_validate({"instances": [{"id": "a", "url": url, "tls": tls}]})


def test_what_fits_together_is_taken(files: Files, others: Files) -> None:
    listening(cert=files.cert, key=files.key)
    listening(cert=files.cert, key=files.key, client_ca=others.ca)
    calling()
    calling(ca=files.ca, cert=others.cert, key=others.key)


def test_files_that_are_not_there_are_named(files: Files) -> None:
    for wrong in ("cert", "key"):
        given = {"cert": files.cert, "key": files.key, wrong: "/no/such"}
        reason = f"{wrong}: /no/such can't be read: No such file"
        with pytest.raises(ValueError, match=reason):
            listening(**given)
        with pytest.raises(ValueError, match=reason):
            calling(**given)
    with pytest.raises(ValueError, match="client_ca: /no/such can't be read"):
        listening(cert=files.cert, key=files.key, client_ca="/no/such")
    with pytest.raises(ValueError, match="ca: /no/such can't be read"):
        calling(ca="/no/such")


def test_a_key_of_another_certificate_is_named(files: Files, others: Files) -> None:
    reason = f"key: {others.key} is not the key of the certificate in {files.cert}"
    with pytest.raises(ValueError, match=reason):
        listening(cert=files.cert, key=others.key)
    with pytest.raises(ValueError, match=reason):
        calling(cert=files.cert, key=others.key)


def test_what_is_no_certificate_or_key_is_named(files: Files, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("nothing")
    for given, reason in (
        ({"cert": str(text), "key": files.key}, f"cert: {text} has no certificate in PEM"),
        ({"cert": files.cert, "key": str(text)}, f"key: {text} has no private key in PEM"),
    ):
        with pytest.raises(ValueError, match=reason):
            listening(**given)
    with pytest.raises(ValueError, match=f"ca: {text} has no certificate in PEM"):
        calling(ca=str(text))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(files: Files) -> None:
    path = Path(files.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match=f"key: {files.key} has a password"):
        listening(cert=files.cert, key=files.key)


def test_half_a_pair_and_tls_without_https_are_refused(files: Files) -> None:
    with pytest.raises(ValueError, match="cert and key: expected both or none"):
        calling(cert=files.cert)
    with pytest.raises(ValueError, match="tls: only for an https url, not http://h:1"):
        calling("http://h:1", ca=files.ca)


def test_check_names_file_line_and_key(
    files: Files, others: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"listen:\n  tls: {{cert: {files.cert}, key: {others.key}}}\ninstances: []\n"
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, "m.yaml")
    assert caught.value.problems[0].startswith(f"m.yaml:2: listen.tls: key: {others.key} is not")
    file = tmp_path / "m.yaml"
    file.write_text(text)
    assert cli.main(["check", "-c", str(file)]) == 1
    assert f"{file}:2: listen.tls: key:" in capsys.readouterr().err

"""pip's settings of this machine, as a build gets them."""

from __future__ import annotations

from pathlib import Path

import package_sources


def test_variables_count_more_than_files_and_only_sources_are_taken() -> None:
    listing = (
        ":env:.cert='/b.pem'\n:env:.disable-pip-version-check='1'\n"
        "global.cert='/a.pem'\nglobal.timeout='9'\ninstall.trusted-host='mirror'\n"
    )
    assert package_sources.parse_pip_settings(listing) == {
        "cert": "/b.pem", "timeout": "9", "trusted-host": "mirror",
    }  # fmt: skip


def test_files_and_folders_get_a_place_where_packages_put_nothing(tmp_path: Path) -> None:
    index = tmp_path / "mirror" / "simple"
    index.mkdir(parents=True)
    cert = tmp_path / "ca.crt"
    cert.touch()
    text, mounts = package_sources.place(
        {"cert": str(cert), "extra-index-url": f"file://{index} https://h/simple", "timeout": "9"}
    )
    assert text == (
        "[global]\ncert = /run/moongate-sources/0/ca.crt\n"
        "extra-index-url = file:///run/moongate-sources/1/mirror/simple https://h/simple\n"
        "timeout = 9\n"
    )
    assert mounts == [
        *("-v", f"{cert}:/run/moongate-sources/0/ca.crt:ro"),
        *("-v", f"{index.parent}:/run/moongate-sources/1/mirror:ro"),
    ]


def test_a_folder_that_is_not_there_stays_as_it_is() -> None:
    assert package_sources.place({"find-links": "/nowhere/wheels"}) == (
        "[global]\nfind-links = /nowhere/wheels\n",
        [],
    )


def test_apts_settings_are_of_use_to_the_same_release_only(tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    release.write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    kept = package_sources.OS_RELEASE
    package_sources.OS_RELEASE = release
    try:
        assert package_sources.apt_mounts("bookworm") == ["-v", "/etc/apt:/etc/apt:ro"]
        assert package_sources.apt_mounts("trixie") == []
        package_sources.OS_RELEASE = tmp_path / "none"
        assert package_sources.apt_mounts("bookworm") == []
    finally:
        package_sources.OS_RELEASE = kept

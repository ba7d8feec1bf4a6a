"""Version files of driver, firmware and CANN, wherever their installers put them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from k3dspark.deploy.versions import (
    cann_of,
    firmware_fits,
    numbers,
    parse_version_file,
    read_ascend_versions,
    release_of,
)

SAMPLES = Path(__file__).parent / "samples" / "version-files"


def fields(name: str) -> dict[str, str]:
    return parse_version_file((SAMPLES / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("driver-25.5.2.info", "25.5.2"),
        ("driver-23.0.3.info", "23.0.3"),
        ("firmware-7.8.info", "25.5.2"),
        ("toolkit-9.1.0.info", "9.1.0"),
        ("toolkit-8.3.RC2.info", "8.3.RC2"),
        ("version.cfg", "8.3.RC2"),
        ("opp-8.5.0.info", "8.5.0"),
        ("ascend_install.info", ""),
    ],
)
def test_each_kind_of_file_states_its_release(name: str, release: str) -> None:
    assert release_of(fields(name)) == release


@pytest.mark.parametrize(
    ("driver", "firmware", "fits"),
    [
        ("driver-25.5.2.info", {"version": "7.8.0.2.212"}, True),
        ("driver-23.0.3.info", {"version": "7.1.0.5.220"}, True),
        ("driver-23.0.3.info", {"version": "7.8.0.2.212"}, False),
        ("driver-23.0.3.info", {"version": "6.4.12"}, True),
        ("driver-23.0.3.info", {}, None),
        ("toolkit-9.1.0.info", {"version": "7.1.0"}, None),
    ],
)
def test_firmware_must_lie_in_a_range_of_the_driver(driver: str, firmware: dict[str, str], fits: bool | None) -> None:
    assert firmware_fits(fields(driver), firmware) is fits


@pytest.mark.parametrize(
    ("engine", "cann"), [("0.17.0", None), ("0.18.0", "8.5.1"), ("0.26.0rc1", "9.1.0"), ("0.32.0rc1", "9.2.1")]
)
def test_an_engine_release_wants_the_cann_it_was_built_with(engine: str, cann: str | None) -> None:
    assert cann_of(Version(engine)) == cann


def test_numbers_stop_before_release_candidates() -> None:
    assert [numbers(text) for text in ("8.3.RC2", "24.1.rc3.7", "25.5.2", "x", "")] == [
        (8, 3),
        (24, 1),
        (25, 5, 2),
        (),
        (),
    ]


def put(root: Path, sample: str, place: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(SAMPLES / sample, path)


def test_versions_are_found_at_the_standard_places(tmp_path: Path) -> None:
    put(tmp_path, "driver-25.5.2.info", "usr/local/Ascend/driver/version.info")
    put(tmp_path, "firmware-7.8.info", "usr/local/Ascend/firmware/version.info")
    put(tmp_path, "toolkit-9.1.0.info", "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info")
    found = read_ascend_versions(tmp_path, {})
    assert found.driver is not None
    assert found.firmware is not None
    assert found.cann is not None
    assert (found.driver.version, found.cann.version) == ("25.5.2", "9.1.0")
    assert found.firmware.fields["version"] == "7.8.0.2.212"


def test_an_own_installation_path_and_the_environment_come_first(tmp_path: Path) -> None:
    put(tmp_path, "ascend_install.info", "etc/ascend_install.info")
    put(tmp_path, "driver-23.0.3.info", "opt/ascend/driver/version.info")
    put(tmp_path, "driver-25.5.2.info", "usr/local/Ascend/driver/version.info")
    put(tmp_path, "toolkit-8.3.RC2.info", "home/me/cann/aarch64-linux/ascend_toolkit_install.info")
    put(tmp_path, "version.cfg", "usr/local/Ascend/ascend-toolkit/latest/version.cfg")
    found = read_ascend_versions(tmp_path, {"ASCEND_HOME_PATH": "/home/me/cann"})
    assert found.driver is not None
    assert found.cann is not None
    assert found.driver.version == "23.0.3"
    assert "home/me/cann" in found.cann.path


def test_an_older_toolkit_states_its_release_in_other_files(tmp_path: Path) -> None:
    put(tmp_path, "version.cfg", "usr/local/Ascend/ascend-toolkit/latest/version.cfg")
    found = read_ascend_versions(tmp_path, {})
    assert found.cann is not None
    assert (found.driver, found.firmware, found.cann.version) == (None, None, "8.3.RC2")


@given(st.binary(max_size=600))
def test_any_bytes_are_a_version_file_with_or_without_a_release(data: bytes) -> None:
    parsed = parse_version_file(data.decode("utf-8", "replace"))
    assert isinstance(release_of(parsed), str)
    firmware_fits(parsed, parsed)


@given(st.text(max_size=40))
def test_any_text_has_numbers_or_none(text: str) -> None:
    assert all(number >= 0 for number in numbers(text))

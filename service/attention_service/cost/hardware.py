"""The devices of ``hardware.toml``, whose costs can be predicted although they are absent."""

import tomllib
from pathlib import Path
from typing import Final

from attention_contract.schemas.hardware import HardwareInfo, HardwareList

PATH: Final = Path(__file__).with_name("hardware.toml")


def _read() -> HardwareList:
    data = tomllib.loads(PATH.read_text("utf-8"))
    sources = data.pop("sources")
    for device in data["hardware"]:
        device["sources"] = [sources[name] for name in device["sources"]]
    return HardwareList.model_validate(data)


HARDWARE: Final = _read()


def find(name: str) -> HardwareInfo | None:
    """Find a device by name, in any case and with or without spaces and hyphens; None if there is none."""
    return next((device for device in HARDWARE.hardware if _plain(device.name) == _plain(name)), None)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())

"""Reads the dependencies of the package from the requirement files when it is built, so that each list exists once."""

from __future__ import annotations

import pathlib

from hatchling.metadata.plugin import interface

EXTRAS = ("weights", "dev", "gpu")


class RequirementFiles(interface.MetadataHookInterface):
    """Fills in what pyproject.toml declares dynamic."""

    def update(self, metadata: dict) -> None:
        """Adds dependencies from requirements.txt, and those of each extra from requirements-EXTRA.txt."""
        metadata["dependencies"] = self._read("requirements.txt")
        metadata["optional-dependencies"] = {extra: self._read(f"requirements-{extra}.txt") for extra in EXTRAS}

    def _read(self, name: str) -> list[str]:
        lines = pathlib.Path(self.root, name).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

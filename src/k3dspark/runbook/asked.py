"""What a run is asked to do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from k3dspark.diagnosis.prompts import PROMPTS, read_prompts
from k3dspark.embedded.pair import EMBEDDED_DRAFT
from k3dspark.embedded.target import embedded_target_dir


@dataclass(frozen=True)
class Asked:
    """None for both directories means the embedded pair. `url` is the engine that serves the pair, if one does.

    `prompts` is a text file of prompts, one a line, for all steps but `accept`; None takes the built-in ones.
    """

    target: Path | None = None
    draft: Path | None = None
    url: str | None = None
    prompts: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    lengths: str = "1K,32K,128K"
    per_length: int = 5
    new_tokens: int = 32
    seed: int = 0

    @property
    def draft_directory(self) -> Path:
        return self.draft if self.draft is not None else EMBEDDED_DRAFT

    @property
    def target_directory(self) -> Path:
        return self.target if self.target is not None else embedded_target_dir()

    def texts(self) -> Sequence[str]:
        """The prompts. Raises `BadInput` for a file that cannot be read."""
        return PROMPTS if self.prompts is None else read_prompts(self.prompts)

    def as_json(self) -> dict[str, Any]:
        """The settings, and the digest of the draft's config.json: an archive is of one draft as it was."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        config = self.draft_directory / "config.json"
        digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
        return {**plain, "config_sha256": digest}

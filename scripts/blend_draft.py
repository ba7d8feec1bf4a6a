"""Average two drafts of one shape, and let the result propose more tokens: a start for `k3dspark train --start`.

    python scripts/blend_draft.py A B --share 0.3 --data DIR --draft-vocab 16384 --out DIR

`--share` is A's part of every weight. The tokens that are added are the most frequent ones of the answers in DIR that
the drafts lack. Their rows of the Markov matrix W2 begin as the mean of the rows of the 2,000 rarest tokens that the
drafts have: rows of zeros would be likelier than trained ones, and were proposed where nothing should be.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from k3dspark.training.shards import ShardStore

RAREST = 2000
W2 = "markov_head.markov_w2.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=Path, nargs=2, metavar="DRAFT")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft-vocab", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already: name another directory")
    first, second = (load_file(draft / "model.safetensors") for draft in arguments.drafts)
    if not torch.equal(first["d2t"], second["d2t"]):
        parser.error("the drafts propose different tokens: their rows cannot be averaged")
    if arguments.draft_vocab < len(first["d2t"]):
        parser.error(f"the drafts propose {len(first['d2t'])} tokens: the vocabulary can only grow")
    blend = {"d2t": first.pop("d2t")}
    for name, tensor in first.items():
        mean = torch.lerp(second[name].float(), tensor.float(), arguments.share)
        blend[name] = mean.to(tensor.dtype)
    config = json.loads((arguments.drafts[1] / "config.json").read_text(encoding="utf-8"))
    counts = ShardStore(arguments.data).token_counts(config["vocab_size"])
    widen(blend, counts, arguments.draft_vocab)
    arguments.out.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in blend.items()}, arguments.out / "model.safetensors")
    config["draft_vocab_size"] = len(blend["d2t"])
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    record = arguments.drafts[1] / "training.json"
    if record.is_file():
        (arguments.out / "training.json").write_bytes(record.read_bytes())


def widen(draft: dict[str, torch.Tensor], counts: torch.Tensor, size: int) -> None:
    """Add tokens to `d2t` and rows to W2 until there are `size`; `counts` [V] says how often each was answered."""
    old = draft["d2t"]
    absent = counts.clone()
    absent[old] = -1
    new = absent.argsort(descending=True, stable=True)[: size - len(old)]
    rarest = counts[old].argsort()[:RAREST]
    row = draft[W2][rarest].float().mean(0).to(draft[W2].dtype)
    draft["d2t"] = torch.cat([old, new.to(old.dtype)])
    draft[W2] = torch.cat([draft[W2], row.expand(len(new), -1)])


if __name__ == "__main__":
    main()

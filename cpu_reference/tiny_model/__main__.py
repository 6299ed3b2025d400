"""``python -m tiny_model --out DIR [--seed 0] [--layers 3] ...``: write a tiny checkpoint, or find it there."""

import argparse
import dataclasses

from tiny_model.spec import TinySpec
from tiny_model.write import write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny_model", description=__doc__)
    parser.add_argument("--out", required=True, help="folder of the checkpoint")
    for field in dataclasses.fields(TinySpec):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    args = vars(parser.parse_args())
    out = args.pop("out")
    spec = TinySpec(**args)
    written = write_checkpoint(out, spec)
    print(f"{'wrote' if written else 'kept'} {out}: {spec.layers} layers, topk {spec.topk}, stamp {spec.stamp}")


if __name__ == "__main__":
    main()

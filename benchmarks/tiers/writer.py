"""A process that writes blocks without end, until it is killed; run by `benchmarks.tiers.disk`.

    python -m benchmarks.tiers.writer SETTINGS

SETTINGS are JSON: folder, budget, first (number), nbytes, key, pause_s. It prints how many blocks were
written so far, a line each time, and reads some of them and of what others write. A wrong block ends it with
a message.
"""

import json
import random
import sys
import time
from pathlib import Path

from benchmarks.tiers.contents import Made, a_tier, read_all, sealing_of


def main() -> None:
    """Write until killed, or until `count` blocks are written."""
    given = json.loads(sys.argv[1])
    sealing = sealing_of(Path(given["key"]) if given["key"] else None)
    made, rng = Made(sealing, tuple(given["nbytes"])), random.Random(given["first"])
    number, told = given["first"], 0
    with a_tier(Path(given["folder"]), given["budget"], sealing, given["nbytes"][1]) as tier:
        print("ready", flush=True)
        while number < given["first"] + given["count"]:
            if tier.has_room and number - given["first"] < tier.counts.written + tier.counts.dropped + 16:
                tier.write(made.block(number), made.content(number))
                number += 1
                time.sleep(given.get("pause_s", 0))
            else:
                time.sleep(0.0005)
            tier.refresh()
            if rng.random() < 0.05:
                some = [rng.randrange(number + 1) for _ in range(4)]
                if wrong := read_all(tier, made, some)["wrong"]:
                    raise SystemExit(f"blocks {wrong} are wrong")
            if tier.counts.written != told:
                told = tier.counts.written
                print(told, tier.counts.dropped, tier.counts.damaged, flush=True)
        while len(tier._queued):
            time.sleep(0.001)
        print(tier.counts.written, tier.counts.dropped, tier.counts.damaged, flush=True)


if __name__ == "__main__":
    main()

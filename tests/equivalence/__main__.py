"""python -m tests.equivalence [--worlds 2 4 8]: the whole cross product, a line per case."""

import argparse
import sys
import time

from tests.equivalence.bounds import shares
from tests.equivalence.cases import WORLDS, Case, covering, every_case
from tests.equivalence.training import on_ranks
from tests.launch import run_ranks

AT_ONCE = 8  # cases of one call


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--covering", action="store_true", help="only what the tests run")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, of eight cases")
    options = parser.parse_args()
    cases = every_case(options.worlds)
    if options.covering:
        cases = covering(cases)
    bad: list[Case] = []
    for world in options.worlds:
        of_world = [case for case in cases if case.world == world]
        for start in range(0, len(of_world), AT_ONCE):
            part = of_world[start : start + AT_ONCE]
            begin = time.monotonic()
            results = run_ranks(on_ranks, world, part, timeout=options.timeout)
            seconds = (time.monotonic() - begin) / len(part)
            for number, case in enumerate(part):
                alike = len({result[number][0] for result in results}) == 1
                used = shares(case, results[0][number][1])
                if used.worst > 1 or not alike:
                    bad.append(case)
                print(
                    f"{case}: of what is allowed, loss {used.loss:.3f} norm {used.norm:.3f} "
                    f"weights {used.weights:.3f}{'' if alike else '; RANKS DIFFER'}"
                    f"{'' if used.worst <= 1 else '; TOO FAR'} ({seconds:.1f} s)",
                    flush=True,
                )
    print(f"{len(cases)} cases, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""One rank of `python -m pyparallel launch`: a script as `python SCRIPT` runs it.

    python -m pyparallel.launched [-m] SCRIPT [ARGUMENT...]

An exception that ends it is left for the launcher to tell, in the file that torchrun's agent names,
as torch.distributed.elastic's `record` leaves it; without importing torch.
"""

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

__all__: list[str] = []


def _run(arguments: "list[str]") -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _leave(error: Exception) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        told = {"message": f"{type(error).__name__}: {error}", "extraInfo": more}
        Path(file).write_text(json.dumps({"message": told}))


if __name__ == "__main__":
    try:
        _run(sys.argv[1:])
    except Exception as error:
        _leave(error)
        raise

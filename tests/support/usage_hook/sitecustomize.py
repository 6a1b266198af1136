"""Writes the resources that a stage's process has used, when it ends.

Every Python whose PYTHONPATH has this folder runs this file. `python -m coldpress.compiler <stage> …`, under any
pipeline engine, then writes one JSON file to the folder that COLDPRESS_USAGE names (benchmarks/compile.py reads them).
Other processes write nothing.
"""

import atexit
import json
import os
import runpy
import sys
import time

_STARTED = time.time()


def _note() -> None:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    text = json.dumps(
        {
            "stage": sys.orig_argv[3],
            "start_s": _STARTED,
            "stop_s": time.time(),
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_rss_bytes": used.ru_maxrss * 1024,
            "disk_read_bytes": used.ru_inblock * 512,
            "disk_write_bytes": used.ru_oublock * 512,
        }
    )
    with open(os.path.join(os.environ["COLDPRESS_USAGE"], f"{os.getpid()}.json"), "w") as file:
        file.write(text)


if "COLDPRESS_USAGE" in os.environ and sys.orig_argv[1:3] == ["-m", "coldpress.compiler"] and len(sys.orig_argv) > 3:
    atexit.register(_note)

if "COLDPRESS_USAGE" in os.environ:  # run the other files of this name, which this one hides
    for _folder in sys.path:
        _other = os.path.join(_folder, "sitecustomize.py")
        if os.path.isfile(_other) and not os.path.samefile(_other, __file__):
            runpy.run_path(_other, run_name="sitecustomize")

# The builds of this run: one, or all of a matrix. compiler/workflow checks settings and contains all code beyond
# Snakemake's documented interface.

import os
import sys
from pathlib import Path

# The compiler of this checkout, whether or not it is installed.
sys.path.insert(0, workflow.basedir)

from coldpress.compiler.workflow import around_snakemake, download, matrix, settings
from coldpress.compiler.workflow.around_snakemake import checked
from coldpress.compiler.workflow.ending import Ending

around_snakemake.start(workflow, settings.ROOT)
BUILDS = checked(matrix.builds_of, config, workflow.is_main_process)
checked(around_snakemake.work_in, workflow, [*BUILDS.values()])
ENDING = Ending(workflow, matrix.asked(BUILDS), Path(os.environ[around_snakemake.CALLED_FROM]), checked)
TARGETS = []


# Each build has the rules of build.smk, with names that begin with its own where there are several. Builds of one
# model share results: the first one has the rules that make them (matrix.SHARED).
for MODULE, BUILD, OWN, SHARED in matrix.modules(BUILDS):

    module:
        name: MODULE
        snakefile:
            "build.smk"
        config:
            {"build": BUILD}

    if OWN == SHARED:  # the only build: to read its rules once saves half a second

        use rule * from MODULE as OWN*

    else:
        if SHARED is not None:
            # fmt: off  (snakefmt does not know lists of rules)
            use rule ingest, tokenize, relufy, calibrate, calibrate_shard, explore from MODULE as SHARED*
            # fmt: on
        use rule * from MODULE exclude ingest, tokenize, relufy, calibrate, calibrate_shard, explore as OWN*

    if MODULE in matrix.asked(BUILDS):
        TARGETS += globals()[MODULE].TARGETS


around_snakemake.time_no_shared_rule(workflow)


onstart:
    ENDING.begin()
    for name, build in BUILDS.items():
        found = globals()[name]
        checked(
            download.download,
            build,
            found.inputs_of_rules(),
            found.record_of("ingest"),
            around_snakemake.threads_here(workflow),
        )


onsuccess:
    ENDING.built()


onerror:
    ENDING.failed()

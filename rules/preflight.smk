# No stage reads the record, so that a new check is no reason to run a stage again (with ancient(), snakemake 9.27 would
# miss stages whose settings have changed). It goes first, and alone, by its priority and because it takes all cores.
rule preflight:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=f"{MODEL}/tokenize.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/preflight.json",
    log:
        f"{DEVICE}/logs/preflight.log",
    benchmark:
        f"{DEVICE}/benchmarks/preflight.tsv"
    priority: 1
    threads: 1024
    params:
        code=stage_digest("preflight"),
        mode=CONFIG.preflight,
        folder=MODEL,
        method=CONFIG.method,
        format=CONFIG.format,
        density=CONFIG.density,
        dram_budget=CONFIG.dram_budget,
        context_length=CONFIG.context_length,
        cache=CONFIG.cache,
        heuristic=CONFIG.order,
        solver=CONFIG.place,
        distill=str(CONFIG.distill).lower(),
        calibration_tokens=CONFIG.calibration_tokens,
        shards=CONFIG.calibration_shards,
    shell:
        RUN + " preflight --mode {params.mode} --folder {params.folder:q} --method {params.method}"
        " --format {params.format} --dram-budget {params.dram_budget:q} --context-length {params.context_length}"
        " --cache {params.cache:q} --order {params.heuristic:q} --place {params.solver:q} --distill {params.distill}"
        " --calibration-tokens {params.calibration_tokens} --shards {params.shards} --jobs {AT_A_TIME}"
        + DENSITY_FLAG
        + " --model {input.model:q} --corpus {input.corpus:q} --device {input.device:q}"
        " --threads {threads} --output {output:q} 2> {log:q}"

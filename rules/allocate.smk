rule allocate:
    input:
        model=f"{MODEL}/ingest.json",
        activations=f"{MODEL}/calibrate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/allocate.json",
    log:
        f"{DEVICE}/logs/allocate.log",
    benchmark:
        f"{DEVICE}/benchmarks/allocate.tsv"
    threads: 1
    params:
        code=stage_digest("allocate"),
        method=CONFIG.method,
        format=CONFIG.format,
        density=CONFIG.density,
        dram_budget=CONFIG.dram_budget,
        context_length=CONFIG.context_length,
        cache=CONFIG.cache,
    shell:
        RUN + " allocate --method {params.method} --format {params.format} --dram-budget {params.dram_budget:q}"
        " --context-length {params.context_length} --cache {params.cache:q}"
        + DENSITY_FLAG
        + " --model {input.model:q}"
        " --activations {input.activations:q} --device {input.device:q} --output {output:q} 2> {log:q}"

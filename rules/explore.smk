rule explore:
    input:
        model=DENSE,
        corpus=f"{MODEL}/tokenize.json",
        activations=f"{MODEL}/calibrate.json",
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json", f"{MODEL}/calibrate.json"),
    output:
        record=f"{MODEL}/explore.json",
        arrays=directory(f"{MODEL}/explore"),
    log:
        f"{MODEL}/logs/explore.log",
    benchmark:
        f"{MODEL}/benchmarks/explore.tsv"
    cache: CACHED
    threads: 8
    resources:
        mem_mb=mem_mb("explore"),
        runtime=runtime("explore"),
    params:
        code=commands.code(CONFIG, "explore"),
        settings=commands.settings(CONFIG, "explore"),
        records=commands.records,
    shell:
        commands.job("explore")

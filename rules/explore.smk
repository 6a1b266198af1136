rule explore:
    input:
        model=DENSE,
        corpus="tokenize.json",
        activations="calibrate.json",
        arrays=arrays(DENSE, "tokenize.json", "calibrate.json"),
    output:
        record="explore.json",
        arrays=directory("explore"),
    log:
        "logs/explore.log",
    benchmark:
        "benchmarks/explore.tsv"
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

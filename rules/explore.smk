rule explore:
    input:
        model=DENSE,
        corpus="tokenize.json",
        activations="calibrate.json",
    output:
        "explore.json",
    log:
        "logs/explore.log",
    benchmark:
        "benchmarks/explore.tsv"
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

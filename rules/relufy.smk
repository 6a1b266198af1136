rule relufy:
    input:
        model="ingest.json",
        corpus="tokenize.json",
    output:
        "relufy.json",
    log:
        "logs/relufy.log",
    benchmark:
        "benchmarks/relufy.tsv"
    threads: 8
    resources:
        mem_mb=mem_mb("relufy"),
        runtime=runtime("relufy"),
    params:
        code=commands.code(CONFIG, "relufy"),
        settings=commands.settings(CONFIG, "relufy"),
        records=commands.records,
    shell:
        commands.job("relufy")

rule relufy:
    input:
        model="ingest.json",
        corpus="tokenize.json",
        arrays=arrays("ingest.json", "tokenize.json"),
    output:
        record="relufy.json",
        arrays=directory("relufy"),
    log:
        "logs/relufy.log",
    benchmark:
        "benchmarks/relufy.tsv"
    cache: CACHED
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

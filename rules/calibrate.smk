rule calibrate:
    input:
        model=DENSE,
        corpus="tokenize.json",
        shards=shards_in("", "calibrate"),
    output:
        "calibrate.json",
    log:
        "logs/calibrate.log",
    benchmark:
        "benchmarks/calibrate.tsv"
    threads: 8
    resources:
        mem_mb=mem_mb("calibrate"),
        runtime=runtime("calibrate"),
    params:
        code=commands.code(CONFIG, "calibrate"),
        settings=commands.settings(CONFIG, "calibrate"),
        records=commands.records,
    shell:
        commands.job("calibrate")


use rule calibrate as calibrate_shard with:
    input:
        model=DENSE,
        corpus="tokenize.json",
    output:
        "calibrate-shards/{shard}.json",
    log:
        "logs/calibrate/{shard}.log",
    benchmark:
        "benchmarks/calibrate/{shard}.tsv"
    params:
        settings=commands.shard(CONFIG, "calibrate"),

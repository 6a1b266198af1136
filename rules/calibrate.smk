rule calibrate:
    input:
        model=DENSE,
        corpus="tokenize.json",
        shards=shards_in("", "calibrate"),
        arrays=arrays(DENSE, "tokenize.json", shards_in("", "calibrate")),
    output:
        record="calibrate.json",
        arrays=directory("calibrate"),
    log:
        "logs/calibrate.log",
    benchmark:
        "benchmarks/calibrate.tsv"
    cache: CACHED
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
        arrays=arrays(DENSE, "tokenize.json"),
    output:
        record="calibrate-shards/{shard}.json",
        arrays=directory("calibrate-shards/{shard}"),
    log:
        "logs/calibrate/{shard}.log",
    benchmark:
        "benchmarks/calibrate/{shard}.tsv"
    params:
        settings=commands.shard(CONFIG, "calibrate"),

rule recalibrate:
    input:
        model=SOURCE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        activations=CALIBRATED,
        shards=shards_in(DEVICE, "recalibrate"),
        arrays=arrays(SOURCE, CORPUS, SPARSITY, CALIBRATED, shards_in(DEVICE, "recalibrate")),
    output:
        record=f"{DEVICE}/recalibrate.json",
        arrays=directory(f"{DEVICE}/recalibrate"),
    log:
        f"{DEVICE}/logs/recalibrate.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("recalibrate"),
    params:
        **commands.params(CONFIG, "recalibrate"),
    shell:
        commands.job("recalibrate")


use rule recalibrate as recalibrate_shard with:
    input:
        model=SOURCE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        activations=CALIBRATED,
        arrays=arrays(SOURCE, CORPUS, SPARSITY, CALIBRATED),
    output:
        record=f"{DEVICE}/recalibrate-shards/{{shard}}.json",
        arrays=directory(f"{DEVICE}/recalibrate-shards/{{shard}}"),
    log:
        f"{DEVICE}/logs/recalibrate/{{shard}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate/{{shard}}.tsv"
    params:
        settings=commands.shard(CONFIG, "recalibrate"),

rule size:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        trained=per_chunk("predict"),
        arrays=arrays(SOURCE, f"{MODEL}/tokenize.json", f"{DEVICE}/allocate.json", per_chunk("predict")),
    output:
        record=f"{DEVICE}/size.json",
    log:
        f"{DEVICE}/logs/size.log",
    benchmark:
        f"{DEVICE}/benchmarks/size.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("size"),
    params:
        **commands.params(CONFIG, "size"),
    shell:
        commands.job("size")

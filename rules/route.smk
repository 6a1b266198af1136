rule route:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        plans=f"{DEVICE}/plan.json",
        layout=f"{DEVICE}/layout.json",
        order=per_chunk("order"),
        placement=f"{DEVICE}/place.json",
        device=f"{DEVICE}/device.json",
        corpus=f"{MODEL}/tokenize.json",
        arrays=arrays(
            SOURCE, f"{DEVICE}/allocate.json", per_chunk("order"), f"{DEVICE}/place.json", f"{MODEL}/tokenize.json"
        ),
    output:
        record=f"{DEVICE}/route.json",
    log:
        f"{DEVICE}/logs/route.log",
    benchmark:
        f"{DEVICE}/benchmarks/route.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("route"),
    params:
        **commands.params(CONFIG, "route"),
    shell:
        commands.job("route")

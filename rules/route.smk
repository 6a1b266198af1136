rule route:
    input:
        model=SOURCE,
        sparsity=SPARSITY,
        plans=f"{DEVICE}/plan.json",
        layout=f"{DEVICE}/layout.json",
        order=ORDER,
        placement=PLACEMENT,
        device=f"{DEVICE}/device.json",
        corpus=CORPUS,
        arrays=arrays(SOURCE, SPARSITY, ORDER, PLACEMENT, CORPUS),
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

rule order:
    input:
        model=SOURCE,
        activations=RECALIBRATED,
        sparsity=SPARSITY,
        placement=PLACEMENT,
        device=f"{DEVICE}/device.json",
        arrays=arrays(RECALIBRATED, SPARSITY, PLACEMENT),
    output:
        record=f"{DEVICE}/order/{{chunk}}.json",
        arrays=directory(f"{DEVICE}/order/{{chunk}}"),
    log:
        f"{DEVICE}/logs/order/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/order/{{chunk}}.tsv"
    cache: CACHED
    resources:
        **needs("order"),
    params:
        **commands.params(CONFIG, "order"),
    shell:
        commands.job("order")

rule order:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        device=f"{DEVICE}/device.json",
        arrays=arrays(f"{DEVICE}/recalibrate.json", f"{DEVICE}/allocate.json", f"{DEVICE}/place.json"),
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

rule order:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/order/{{chunk}}.json",
    log:
        f"{DEVICE}/logs/order/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/order/{{chunk}}.tsv"
    threads: 1
    resources:
        mem_mb=mem_mb("order"),
        runtime=runtime("order"),
    params:
        code=commands.code(CONFIG, "order"),
        settings=commands.settings(CONFIG, "order"),
        records=commands.records,
        layers=commands.layers,
    shell:
        commands.job("order")

rule layout:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        order=per_chunk("order"),
        device=f"{DEVICE}/device.json",
        predictors=PREDICTORS,
        activations=f"{DEVICE}/recalibrate.json",
    output:
        f"{DEVICE}/layout.json",
    log:
        f"{DEVICE}/logs/layout.log",
    benchmark:
        f"{DEVICE}/benchmarks/layout.tsv"
    threads: 1
    params:
        code=code("layout"),
        settings=flags("layout"),
    shell:
        job("layout") + " --model {input.model:q} --sparsity {input.sparsity:q}"
        " --placement {input.placement:q} --order {input.order:q} --device {input.device:q} --activations {input.activations:q}"
        + PREDICTORS_FLAG
        + " 2> {log:q}"

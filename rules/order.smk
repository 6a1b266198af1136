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
    params:
        code=code("order"),
        settings=flags("order"),
        layers=layers,
    shell:
        job("order") + " --model {input.model:q} --activations {input.activations:q} --sparsity {input.sparsity:q}"
        " --placement {input.placement:q} --device {input.device:q} --layers {params.layers} 2> {log:q}"

rule report:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        device=f"{DEVICE}/device.json",
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        order=per_chunk("order"),
        predictors=PREDICTORS,
        layout=f"{DEVICE}/layout.json",
        package=f"{DEVICE}/publish.json",
        verification=f"{DEVICE}/verify.json",
    output:
        metrics=f"{DEVICE}/metrics.json",
        html=f"{DEVICE}/report.html",
    log:
        f"{DEVICE}/logs/report.log",
    benchmark:
        f"{DEVICE}/benchmarks/report.tsv"
    threads: 1
    params:
        code=code("report"),
        settings=flags("report"),
    shell:
        job("report") + " --html {output.html:q} --model {input.model:q} --corpus {input.corpus:q}"
        " --device {input.device:q}"
        " --activations {input.activations:q} --sparsity {input.sparsity:q} --placement {input.placement:q}"
        " --order {input.order:q}" + PREDICTORS_FLAG + " --layout {input.layout:q} --package {input.package:q}"
        " --verification {input.verification:q} 2> {log:q}"

# Snakemake takes away declared outputs before a job runs, and an artifact must be whole whenever it can be seen. So the
# manifest is declared by way of a link to it, which leads to wherever the artifact stands (compiler/publishing.py): what
# is taken away is the link, and where there is no artifact the link leads nowhere and Snakemake misses its output.
rule package:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
        layout=f"{DEVICE}/layout.json",
        order=per_chunk("order"),
        placement=f"{DEVICE}/place.json",
        quantized=per_chunk("quantize"),
        predictors=PREDICTORS,
    output:
        record=f"{DEVICE}/package.json",
        manifest=f"{DEVICE}/package/manifest.json",
    log:
        f"{DEVICE}/logs/package.log",
    benchmark:
        f"{DEVICE}/benchmarks/package.tsv"
    localrule: True
    threads: 1
    resources:
        mem_mb=mem_mb("package"),
        runtime=runtime("package"),
    params:
        code=commands.code(CONFIG, "package"),
        settings=commands.settings(CONFIG, "package"),
        records=commands.records,
    shell:
        commands.job("package", "--artifact {FOLDER:q}/{DEVICE:q}/package/artifact")

# Snakemake deletes declared outputs before a job runs, but a visible artifact must be whole. So the declared output is a
# link to the manifest, wherever the artifact is (compiler/publishing.py): Snakemake deletes only the link, and without
# an artifact the link is dangling, so that Snakemake finds its output missing.
rule package:
    input:
        model=SOURCE,
        corpus=CORPUS,
        sparsity=SPARSITY,
        device=f"{DEVICE}/device.json",
        layout=f"{DEVICE}/layout.json",
        plans=PLANS,
        order=ORDER,
        placement=PLACEMENT,
        quantized=per_chunk("quantize"),
        predictors=PREDICTORS,
        curves=CURVES,
        draft_package=DRAFT_PACKAGE,
        arrays=arrays(SOURCE, CORPUS, SPARSITY, ORDER, PLACEMENT, per_chunk("quantize"), PREDICTORS, CURVES),
    output:
        record=local(f"{DEVICE}/package.json"),
        manifest=local(f"{DEVICE}/package/manifest.json"),
    log:
        f"{DEVICE}/logs/package.log",
    benchmark:
        f"{DEVICE}/benchmarks/package.tsv"
    localrule: True
    resources:
        **needs("package"),
    params:
        **commands.params(CONFIG, "package"),
    shell:
        commands.job("package", "--artifact {BUILDS:q}/{DEVICE:q}/package/artifact")

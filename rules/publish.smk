# For the link see rules/package.smk.
rule publish:
    input:
        local(f"{DEVICE}/package/manifest.json"),
        package=local(f"{DEVICE}/package.json"),
        verification=local(f"{DEVICE}/verify.json"),
    output:
        record=local(f"{DEVICE}/publish.json"),
        manifest=local(f"{DEVICE}/manifest.json"),
    log:
        f"{DEVICE}/logs/publish.log",
    benchmark:
        f"{DEVICE}/benchmarks/publish.tsv"
    localrule: True
    resources:
        **needs("publish"),
    params:
        **commands.params(CONFIG, "publish"),
    shell:
        commands.job(
            "publish",
            "--artifact {BUILDS:q}/{DEVICE:q}/{NAME:q}.coldpress --metrics {BUILDS:q}/{DEVICE:q}/metrics.json"
            " --html {BUILDS:q}/{DEVICE:q}/report.html --exported {EXPORTED:q}",
        )

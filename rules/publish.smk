# The artifact itself is no output: snakemake would take away what stands there, file by file, before the new one is
# whole. It is told of the record alone; rules/common.smk looks whether the artifact is there.
rule publish:
    input:
        package=f"{DEVICE}/package.json",
        verification=f"{DEVICE}/verify.json",
    output:
        record=f"{DEVICE}/publish.json",
        due=[touch(path) for path in PUBLISH_DUE],
    log:
        f"{DEVICE}/logs/publish.log",
    benchmark:
        f"{DEVICE}/benchmarks/publish.tsv"
    localrule: True
    threads: 1
    params:
        code=code("publish"),
        settings=flags("publish"),
    shell:
        job("publish") + " --artifact {ARTIFACT:q} --metrics {FOLDER:q}/{DEVICE:q}/metrics.json"
        " --html {FOLDER:q}/{DEVICE:q}/report.html --exported {EXPORTED:q}"
        " --package {input.package:q} --verification {input.verification:q} 2> {log:q}"

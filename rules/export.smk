rule export:
    input:
        package=local(f"{DEVICE}/publish.json"),
    output:
        record=local(f"{DEVICE}/export.json"),
        exported=local(f"{DEVICE}/{NAME}.{CONFIG['export']}"),
    log:
        f"{DEVICE}/logs/export.log",
    benchmark:
        f"{DEVICE}/benchmarks/export.tsv"
    localrule: STORED
    resources:
        **needs("export"),
    params:
        **commands.params(CONFIG, "export"),
    shell:
        commands.job("export", "--file {output.exported:q}")

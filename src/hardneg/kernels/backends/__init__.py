"""The backends of the row engine; ``kernels.engine`` defines their contract and chooses one."""

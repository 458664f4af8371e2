"""The check of the kernels on a person's own GPU: is every variant right, and how fast is decode?"""

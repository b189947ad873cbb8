"""Parameters of exercises that have one value in their check, and why no answer can make use of that."""

ONE_VALUE = {
    "02.6 keep_matmuls kwargs": "of operators: the policy takes them and hands nothing on",
    "02.11 marked_training model": "it is called and trained; the losses of four steps are compared",
    "02.11 marked_training text": "the batches that it makes are compared by their losses",
    "04.8 parallel_accumulate dp": "it is called; its group, ranks and micro-batches vary",
    "04.8 parallel_accumulate loss_of": "the check counts its calls",
    "04.10 find_diverged_params module": "its tensors differ by rank, which decides the result",
    "07.12 all_gather_forward attention": "the check's own block of attention, which notes its calls",
    "08.9 RouterLoss.forward router": "its coefficients and its weight of the loss vary",
    "14.6 block_matmul_kernel block_k": "the blocks of the scales are 128 wide",
    "14.6 block_matmul_kernel scale_a_block": "scales are contiguous along k",
    "14.6 block_matmul_kernel scale_b_block": "scales are contiguous along k",
}

"""What parameter names show: equal parameters under other names, ties, slicing rules, adapters.

    names.py            prefixes of wrappers, numbers, and renames by the user
    order.py            the order of the module's parameters
    ties.py             second names of tied weights
    weights.py          the names of weights that a class of transformers asks for
    peft.py             names of adapters' weights
    families/           names and fused weights of models in Hugging Face and in Megatron-Core
    saving/             names under which transformers saves modules' weights
    views.py            tensors made from others by slicing, joining, transposing, reordering
    tensor_rules.py     how tensor-parallel ranks slice tensors; tensor_families.py: known models
    universal_info.py   the slicing rules in DeepSpeed's files; patterns.py: their name patterns
    auto_tp.py          how DeepSpeed's AutoTP divides a dimension among tensor-parallel ranks

Facts about the names in a model are data: JSON tables, here and in families/ and saving/.
"""

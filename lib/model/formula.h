// Sizes as the tables of model families write them: "num_key_value_heads*head_dim", "hidden_size/num_attention_heads".
// Sums of products of whole numbers and members of a config.json; division rounds down.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

// The value of a name; nothing where there is none.
using NumberOf = std::function<std::optional<Index>(std::string_view name)>;

// Fails where a name has no value ("num_experts is not given"), on overflow, and on what is no formula.
Result<Index> evaluate(std::string_view formula, const NumberOf& number_of);

// Whether it is nothing but one name.
bool is_single_name(std::string_view formula);

// The formula with its numbers, for people: "num_key_value_heads 8 x head_dim 128"; names without a value stay bare.
std::string explain(std::string_view formula, const NumberOf& number_of);

}  // namespace reshard

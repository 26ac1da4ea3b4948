// SPDX-License-Identifier: Apache-2.0
// The order in which torch numbers the parameters of a transformers model: that of model.named_parameters(). Optimizers
// save their state under these numbers. Safetensors files do not have this order; the table is transformers' own
// (samples/families/parameter_order.json, which samples/families/generate.py makes).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

// Returns `names`, the parameters of a model of this type, in their order. Nothing if the table does not have the type
// or one of the names.
std::optional<std::vector<std::string>> in_parameter_order(std::string_view model_type,
                                                           const std::vector<std::string>& names);

}  // namespace reshard

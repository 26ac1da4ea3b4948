// What verify and diff share: two checkpoints made ready to be compared, and words for what is found.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/registry.h"
#include "lib/audit/comparison.h"
#include "lib/base/json.h"
#include "tools/job_options.h"

namespace reshard::tools {

// Pairs the tensors of a and b, which must outlive the result. The paths are the user's: a config.json is looked for
// in both, unless `model` names one.
Result<std::unique_ptr<Comparison>> compare(OpenCheckpoint& a, OpenCheckpoint& b, const ModelOptions& model,
                                            const std::string& path_a, const std::string& path_b,
                                            const ResourceOptions& resources);

// Tensors that cannot be compared element by element, and objects that only one side has, as sentences.
std::vector<std::string> structural_differences(const Comparison& c);

Json shape_json(const Dims& shape);

// $TMPDIR, or /tmp.
std::string temporary_directory();

}  // namespace reshard::tools

#include "formats/tensor_files/placeholders.h"

#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::string_view kStep = "global_step";

// The last of the steps in a directory, if it has some.
std::string last_step(const std::string& directory) {
  std::string last;
  if (const auto entries = list_directory(directory))
    for (const DirectoryEntry& e : *entries)
      if (e.is_directory && e.name.starts_with(kStep) && (last.empty() || natural_less(last, e.name))) last = e.name;
  return last.empty() ? last : path_join(directory, last);
}

}  // namespace

Status refuse_placeholders(const Catalog& catalog, const std::string& path) {
  Index weights = 0, empty = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (!t.name.ends_with(".weight")) continue;
    ++weights;
    empty += t.shape == Dims{0} ? 1 : 0;
  }
  if (2 * empty <= weights) return {};
  const std::string directory = is_directory(path) ? path : parent_path(path);
  std::string where = base_name(directory).starts_with(kStep) ? directory : last_step(directory);
  if (where.empty()) where = last_step(parent_path(directory));
  return unsupported(path + ": " + with_commas(empty) + " of " + count_of(weights, "weight") +
                     " are placeholders of size [0], as ZeRO 3 has them in a model that is saved without being " +
                     "gathered: the weights are in " +
                     (where.empty() ? "the global_stepN/ of its run, which is to be opened"
                                    : printable(where) + ", which is to be opened"));
}

}  // namespace reshard

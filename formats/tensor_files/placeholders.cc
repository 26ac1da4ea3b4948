// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/placeholders.h"

#include "lib/base/file.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::string_view kStepDirectory = "global_step";

// Returns the last step in a directory, or an empty text.
std::string last_step(const PathSnapshot& directory) {
  std::string last;
  for (const DirectoryEntry& e : directory.entries())
    if (e.is_directory && e.name.starts_with(kStepDirectory) && (last.empty() || natural_less(last, e.name)))
      last = e.name;
  return last.empty() ? last : path_join(directory.path(), last);
}

}  // namespace

Status refuse_placeholders(const Catalog& catalog, const PathSnapshot& place) {
  Index weights = 0, empty = 0;
  for (const Tensor& t : catalog.tensors()) {
    if (!t.name.ends_with(".weight")) continue;
    ++weights;
    empty += t.shape == Dims{0} ? 1 : 0;
  }
  if (2 * empty <= weights) return {};
  const PathSnapshot& directory = *TRY(place.directory());
  std::string where = directory.name().starts_with(kStepDirectory) ? directory.path() : last_step(directory);
  if (where.empty())
    TRY(look_if_possible([&]() -> Status {
      where = last_step(*TRY(directory.parent()));
      return {};
    }));
  return unsupported(
      place.path() + ": " + with_commas(empty) + " of " + count_of(weights, "weight") +
      " are placeholders of size [0], which ZeRO 3 saves for weights that were not gathered: " + "the weights are in " +
      (where.empty() ? "the global_stepN/ of its run; open that" : printable(where) + "; open that"));
}

}  // namespace reshard

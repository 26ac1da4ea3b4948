// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/parameter_lists.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"

namespace reshard {
namespace {

bool is_parameter_list(std::string_view name) {
  const StateKey key = split_state_key(name);
  return key.prefix.ends_with(".param_groups.") && key.suffix == ".params";
}

// Returns the names in the object, or none if it is not a list of names.
Result<std::vector<std::string>> names_in(const std::string& bytes) {
  std::vector<std::string> out;
  if (bytes.find_first_not_of('\0') == std::string::npos) return out;  // when planning without data
  const pickle::Document document = TRY(torch_archive::read_object_item(bytes));
  const pickle::Value list = document.root();
  if (list.kind() != pickle::Kind::kList) return out;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto name = list[i].as_string();
    if (!name) return std::vector<std::string>();
    out.emplace_back(*name);
  }
  return out;
}

}  // namespace

std::string pickled_names(const std::vector<std::string>& names) {
  pickle::PickleWriter w;
  w.empty_list();
  pickle::ElementRuns runs(w, &pickle::PickleWriter::append_items);
  for (const std::string& name : names) {
    runs.next();
    w.text(name);
  }
  runs.end();
  return std::move(w).finish();
}

Status rename_parameter_lists(LayoutRequest& request) {
  if (!request.renamed) return {};
  for (TargetBlob& blob : request.blobs) {
    if (!is_parameter_list(blob.name)) continue;
    const std::vector<std::string> names = TRY(names_in(blob.bytes).context("object '" + printable(blob.name) + "'"));
    std::vector<std::string> renamed;
    std::unordered_set<std::string> seen;  // parts of one tensor share its name
    for (const std::string& name : names)
      for (std::string& now : request.renamed(name))
        if (seen.insert(now).second) renamed.push_back(std::move(now));
    if (renamed != names) blob.bytes = torch_archive::object_item(pickled_names(renamed));
  }
  request.renamed = nullptr;
  return {};
}

}  // namespace reshard

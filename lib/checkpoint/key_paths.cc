// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/key_paths.h"

namespace reshard {

std::vector<std::string> names_off_paths(const Catalog& catalog) {
  std::vector<std::string> off;
  bool has_paths = false;
  const auto look_at = [&](const std::string& name, const KeyPath& path) {
    has_paths = has_paths || !path.empty();
    if (dotted_name(path) != name) off.push_back(name);
  };
  for (const Tensor& t : catalog.tensors()) look_at(t.name, t.path);
  for (const Blob& b : catalog.blobs) look_at(b.name, b.path);
  return has_paths ? off : std::vector<std::string>();
}

}  // namespace reshard

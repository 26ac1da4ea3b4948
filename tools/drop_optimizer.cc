// SPDX-License-Identifier: Apache-2.0
#include "tools/drop_optimizer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <vector>

#include "formats/open.h"
#include "lib/base/file.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/parts.h"

namespace reshard::tools {
namespace {

// Returns `name` up to its word for an optimizer: "app.optim" of "app.optim.state.norm.weight.exp_avg".
std::string optimizer_root(std::string_view name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_optimizer_word(name.substr(begin, end - begin))) return std::string(name.substr(0, end));
    begin = end + 1;
  }
  return {};
}

// Returns the roots of the optimizers' names. Fails if there is an optimizer without one.
Result<std::set<std::string>> optimizer_roots(const Catalog& catalog) {
  std::set<std::string> out;
  const auto add = [&](const auto& entry) -> Status {
    if (state_kind(entry.key()) != StateKind::kOptimizer) return {};
    const std::string root = optimizer_root(entry.name);
    if (root.empty())
      return unsupported(printable(catalog.root) + ": '" + printable(entry.name) +
                         "' is the optimizer's, and its name does not say so");
    out.insert(root);
    return {};
  };
  for (const Tensor& tensor : catalog.tensors()) TRY(add(tensor));
  for (const Blob& blob : catalog.blobs) TRY(add(blob));
  return out;
}

// Returns what is in a directory besides `written` and reshard's manifest. Fails if it contains links.
Result<std::vector<Node>> other_nodes(const std::string& directory, const std::set<std::string>& written) {
  std::vector<Node> out = TRY(list_tree(directory));
  for (const Node& node : out)
    if (!node.is_directory() && !node.is_regular())
      return unsupported(printable(path_join(directory, node.name)) +
                         ": is neither a file nor a directory, so the checkpoint is not rewritten");
  std::erase_if(out, [&](const Node& node) { return written.contains(node.name) || node.name == kManifestFile; });
  return out;
}

// Gives `to` files of `from`, as further names of the same files. Replaces files of the same name.
Status link_files(const std::vector<Node>& nodes, const std::string& from, const std::string& to) {
  for (const Node& node : nodes) {
    const std::string target = path_join(to, node.name);
    if (node.is_directory()) {
      if (!TRY(path_exists(target))) TRY(make_directory(target));
      continue;
    }
    if (TRY(path_exists(target))) TRY(remove_file(target));
    if (sys().link(path_join(from, node.name).c_str(), target.c_str()) != 0)
      return io_error(printable(target) + ": cannot link: " + std::strerror(errno));
  }
  return sync_directory(to);
}

}  // namespace

Result<bool> drop_optimizer(const std::string& source, const std::string& work, const ResourceOptions& resources) {
  ConvertOptions one;
  std::set<std::string> written;
  {
    OpenCheckpoint open = TRY(open_checkpoint(source));
    const Format& format = *open.format;
    if (!TRY(is_directory(source)) || format.holds != StateSupport::kEverything ||
        format.sharding != Sharding::kBoxes || !format.lay_out)
      return unsupported(printable(source) + ": " + std::string(format.title) +
                         " cannot be rewritten without its optimizer, only a Distributed Checkpoint");
    one.to = format.name;
    Catalog& catalog = open.reader->catalog();
    TRY(find_parts(catalog));
    const std::set<std::string> roots = TRY(optimizer_roots(catalog));
    if (roots.empty()) return false;
    for (const std::string& root : roots) one.exclude.push_back(glob_escaped(root) + ".*");
    for (const CatalogFile& file : catalog.files) written.insert(file.path);
    written.insert(catalog.metadata_files.begin(), catalog.metadata_files.end());
    if (catalog.files.size() > 1) one.mesh = "dp_shard=" + std::to_string(catalog.files.size());
  }
  one.source = source;
  one.destination = work;
  one.model.family = "none";
  one.resources = resources;
  one.resources.quiet = true;
  const std::vector<Node> others = TRY(other_nodes(source, written));
  if (TRY(path_exists(work))) TRY(remove_tree(work));  // of a rewrite that failed
  TRY(convert(one));
  TRY(link_files(others, source, work));
  TRY(exchange_paths(work, source));
  TRY(sync_directory(parent_path(source)));
  TRY(remove_tree(work));
  return true;
}

}  // namespace reshard::tools

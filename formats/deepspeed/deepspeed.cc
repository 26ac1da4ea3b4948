#include "formats/deepspeed/deepspeed.h"

#include <algorithm>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/layout/layout.h"

namespace reshard {
namespace deepspeed {
namespace {

constexpr Index kMaxTagBytes = 256;

bool take_rank(std::string_view& text, std::string_view before, Index& n) {
  const auto taken = take(text, before) ? take_number(text) : std::nullopt;
  n = taken.value_or(0);
  return taken && n < kMaxMeshRanks;
}

constexpr std::string_view kModel = "_model_states.pt", kOptimizer = "_optim_states.pt";

}  // namespace

std::optional<FileName> parse_file_name(std::string_view name) {
  FileName out;
  if (take_rank(name, "layer_", out.layer)) {
    out.kind = name.starts_with("_expert_") ? FileName::Kind::kExpert : FileName::Kind::kLayer;
    if (out.kind == FileName::Kind::kExpert
            ? !take_rank(name, "_expert_", out.expert) || !take_rank(name, "_mp_rank_", out.part)
            : name.starts_with("-model_") && !name.starts_with("-model_states") &&
                  !take_rank(name, "-model_", out.part))
      return std::nullopt;
    if (name == (out.kind == FileName::Kind::kExpert ? kModel : std::string_view("-model_states.pt"))) return out;
    return std::nullopt;
  }
  take(name, "bf16_");
  Index rank = 0;
  if (take_rank(name, "zero_pp_rank_", rank)) {
    out.rank = rank;
    if (!take(name, "_")) return std::nullopt;
  }
  if (!take_rank(name, "mp_rank_", out.part)) return std::nullopt;
  if (name == kModel) return out;
  out.kind = FileName::Kind::kOptimizer;
  if (name == kOptimizer && out.rank) return out;
  return std::nullopt;
}

namespace {

bool is_model_states(const DirectoryEntry& e) {
  const auto name = e.is_directory ? std::nullopt : parse_file_name(e.name);
  return name && (name->kind == FileName::Kind::kModel || name->kind == FileName::Kind::kOptimizer);
}

bool is_tag_directory(const Place& place) {
  return std::any_of(place.entries().begin(), place.entries().end(), is_model_states);
}

// What the file says, where it may be the name of a directory beside it.
Result<std::optional<std::string>> tag_of(const Place& place, std::string_view file) {
  auto text = TRY(place.text_of(file, kMaxTagBytes));
  if (!text) return text;
  while (!text->empty() && (text->back() == '\n' || text->back() == '\r' || text->back() == ' ')) text->pop_back();
  if (text->empty() || *text == "." || *text == ".." || text->find('/') != std::string::npos ||
      text->find('\0') != std::string::npos)
    return std::optional<std::string>();
  return text;
}

Result<bool> is_ours(const Place& place, const std::string& tag) {
  const Place directory = TRY(place.inside(tag));
  return directory.is_directory() ? is_tag_directory(directory) : tag.starts_with("global_step");
}

Result<bool> recognises(const Place& place) {
  for (const std::string_view file : {kLatestFile, kLatestUniversalFile})
    if (const auto tag = TRY(tag_of(place, file)); tag && TRY(is_ours(place, *tag))) return true;
  return is_tag_directory(place);
}

}  // namespace

Result<FileSet> find_files(const std::string& path) {
  FileSet set;
  set.root = path;
  const Place place = TRY(Place::look(path));
  for (const std::string_view file : {kLatestFile, kLatestUniversalFile}) {
    const auto tag = TRY(tag_of(place, file));
    if (!tag || !TRY(is_ours(place, *tag))) continue;
    set.latest = file;
    set.directory = *tag + "/";
    break;
  }
  const std::string directory = set.directory.empty() ? path : path_join(path, set.directory);
  if (!set.directory.empty() && !is_directory(directory))
    return io_error(path_join(path, set.latest) + ": names '" + printable(base_name(directory)) +
                    "', which is not there; open the directory of another step by its path");
  std::string cut_layer;  // one that tensor-parallel ranks have parts of
  for (const DirectoryEntry& e : TRY(list_directory(directory))) {
    set.is_universal = set.is_universal || (e.is_directory && e.name == kUniversalDirectory);
    const auto name = e.is_directory ? std::nullopt : parse_file_name(e.name);
    const std::string file = set.directory + e.name;
    if (!name && !e.is_directory && e.name.ends_with(kOptimizer)) set.unread.push_back(file);
    if (!name) continue;
    bool is_new = true;
    switch (name->kind) {
      case FileName::Kind::kModel:
        is_new = set.models.emplace(std::pair(name->part, name->rank.value_or(-1)), file).second;
        break;
      case FileName::Kind::kOptimizer:
        is_new = set.optimizers.emplace(std::pair(name->part, *name->rank), file).second;
        break;
      case FileName::Kind::kLayer:
        if (name->part > 0) {
          cut_layer = file;
          break;
        }
        is_new = set.layers.emplace(name->layer, file).second;
        break;
      case FileName::Kind::kExpert:
        is_new = set.experts.emplace(std::pair(name->layer, name->expert), file).second;
        break;
    }
    if (!is_new)
      return corrupt(path_join(path, file) +
                     ": expected one file of its rank, got another beside it: files of two "
                     "saves in one directory");
  }
  if (!cut_layer.empty() && !set.is_universal)
    return unsupported(path_join(path, cut_layer) +
                       ": a layer of one tensor-parallel rank, and how its parts join is not in the files; "
                       "ds_to_universal.py makes a universal checkpoint of them, which is read");
  if (!cut_layer.empty()) set.layers.clear();  // each parameter is whole in a file of its own
  if (set.models.empty())
    return io_error(directory +
                    ": expected the file mp_rank_00_model_states.pt, got optimizer "
                    "states alone: the model's names are in it");
  return set;
}

}  // namespace deepspeed

const Format kDeepspeedFormat = {
    .name = "deepspeed",
    .title = "DeepSpeed",
    .recognises = deepspeed::recognises,
    .open = deepspeed::open,
    .lay_out = nullptr,
    .has_masters = true,
};

const Format kDeepspeedUniversalFormat = {
    .name = "deepspeed-universal",
    .title = "DeepSpeed's universal checkpoint",
    .recognises = [](const Place&) -> Result<bool> { return false; },
    .open = nullptr,
    .lay_out = deepspeed::lay_out_universal,
    .holds = Holds::kAdam,
    .takes_object = deepspeed::takes_object,
    .hf_names = true,
};

}  // namespace reshard

// SPDX-License-Identifier: Apache-2.0
#include "formats/open.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "formats/bin/bin.h"
#include "formats/dcp/dcp.h"
#include "formats/megatron/fsdp_dtensor.h"
#include "formats/megatron/megatron.h"
#include "formats/ranks/ranks.h"
#include "formats/training_run.h"
#include "lib/base/file.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/storage/secret_query.h"
#include "lib/base/storage/storage.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/checkpoint/provenance.h"
#include "lib/checkpoint/side_files.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

// Returns whether everything that is stored belongs to a model, under its loaders' names and not inside a dictionary
// next to other values.
bool is_model(const Catalog& catalog) {
  const auto& tensors = catalog.tensors();
  return catalog.has_model_names &&
         std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.path.size() < 2; });
}

// Adds a warning if the file is one of several ranks', whose plain tensors may be parts.
Status doubt_single_rank(const PathSnapshot& place, Catalog& catalog) {
  if (!catalog.shape_doubt.empty()) return {};
  const std::string other = TRY(ranks::other_rank_of(place));
  if (other.empty()) return {};
  catalog.warnings.push_back(catalog.shape_doubt = "This is the file of one rank, next to " + printable(other) +
                                                   ": if each rank saved a part of a tensor, only one part is read. " +
                                                   "Open the directory to join the parts (docs/formats/ranks.md).");
  return {};
}

Result<std::optional<OpenCheckpoint>> open_snapshot(const PathSnapshot& place, const OpenOptions& options) {
  std::optional<OpenCheckpoint> open = TRY(open_parts(place, options));
  if (!open)
    if (const Format* f = TRY(recognised_format(place))) {
      std::unique_ptr<Reader> reader = TRY(f->open(place, options));
      open = OpenCheckpoint{f, std::move(reader)};
    }
  if (!open)
    if (const PathSnapshot* const inner = TRY(checkpoint_of_step(place))) return open_snapshot(*inner, options);
  if (open && options.weights == Weights::kMaster && !open->format->has_masters)
    return usage_error(place.path() + ": --weights master needs a training state that stores its parameters twice; " +
                       std::string(open->format->title) + " stores them once");
  if (!open) return open;
  if (open->format == &kDcpFormat) open->reader = TRY(megatron::with_config_of_args(std::move(open->reader)));
  TRY(join_optimizers(place, options.config, *open));
  Catalog& catalog = open->reader->catalog();
  if (const std::string iteration = TRY(megatron::iteration_without_tensors(place)); !iteration.empty())
    catalog.notes.push_back(iteration + ", which " + std::string(megatron::kLatestFile) +
                            " names, has no tensors; the files next to it are read.");
  if (open->format->sharding == Sharding::kNone && catalog.files.size() == 1) TRY(doubt_single_rank(place, catalog));
  catalog.has_model_names = open->format->hf_names;
  TRY(adopt_provenance(*open->reader));
  TRY(find_parts(catalog, options.keys, is_model(catalog), Families(options.own_family)));
  return open;
}

// Returns the directory with the same key as an object, which only stores of objects can have; nothing if there is
// none.
Result<std::optional<PathSnapshot>> directory_of_same_key(const PathSnapshot& object) {
  if (!object.is_file() || !is_url(object.path())) return std::optional<PathSnapshot>();
  const IoFailureWatch watch;
  auto directory = PathSnapshot::look(object.path() + "/");
  if (!directory && watch.may_be_io_failure(directory.error())) return std::move(directory).error();
  return directory && directory->is_directory() ? std::optional(std::move(*directory)) : std::nullopt;
}

// Opens what a path names. An object that is no checkpoint may have the key of a directory that is one.
Result<std::optional<OpenCheckpoint>> open_named(const PathSnapshot& place, const OpenOptions& options) {
  auto open = open_snapshot(place, options);
  if (open && *open) return open;
  const auto directory = TRY(directory_of_same_key(place));
  if (!directory) return open;
  if (!open)
    return Error(
        open.error().code(),
        open.error().message() + "; to open the directory with the same key, add a slash: " + directory->path());
  return open_snapshot(*directory, options);
}

// Names of files in which other programs store models: the end of the name, and the program.
constexpr std::pair<std::string_view, std::string_view> kOthers[] = {
    {"tf_model.h5", "TensorFlow's"},
    {".ckpt.index", "TensorFlow's"},
    {".msgpack", "Flax's"},
    {".onnx", "ONNX's"},
    {".keras", "Keras's"},
    {".weights.json", "Keras's list of .weights.h5 files, which can be opened one by one"},
    {".npz", "NumPy's"},
    {".pdparams", "Paddle's"},
    {".pdopt", "Paddle's"},
    {".pt2", "torch.export's"},
    {".tensors", "tensorizer's"},
    {".snapshot_metadata", "torchsnapshot's"}};

// Returns the program that gives files such a name, in the genitive; empty if it is unknown.
std::string_view owner_of_name(std::string_view name) {
  for (const auto& [end, owner] : kOthers)
    if (name.ends_with(end)) return owner;
  // "0.metadata" and "0_0.distcp"; PyTorch's are ".metadata" and "__0_0.distcp".
  const bool is_of_paddle = name.ends_with(".metadata") || name.ends_with(".distcp");
  return is_of_paddle && is_digits(name.substr(0, 1)) ? "Paddle's" : std::string_view();
}

// Returns whether a file begins as a map in msgpack that is not empty and whose first key is a short text.
bool is_msgpack_map(std::string_view head) {
  constexpr unsigned kMap = 0x80, kText = 0xa0, kMost = 0x1f;
  if (head.size() < 2) return false;
  const auto map = static_cast<unsigned char>(head[0]), text = static_cast<unsigned char>(head[1]);
  const std::size_t length = text & kMost;
  if (map <= kMap || map > kMap + 15 || (text & ~kMost) != kText || length == 0 || head.size() < 2 + length)
    return false;
  const std::string_view key = head.substr(2, length);
  return std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c <= '~'; });
}

// Returns the same as owner_of_name() for the first bytes of a file.
std::string_view owner_of_bytes(std::string_view head) {
  if (head.starts_with("|TZR|")) return "tensorizer's";
  return is_msgpack_map(head) ? "Flax's" : std::string_view();  // "checkpoint_5" of flax.training.checkpoints
}

constexpr std::string_view kWebPage =
    "a web page, perhaps an error of the server it came from; download the file again";

// The first bytes of files that hold a checkpoint only after another program has unpacked or fetched it.
struct Signature {
  std::string_view bytes, advice;
};
constexpr Signature kWrapped[] = {
    {"\x1f\x8b", "compressed by gzip; unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it with unzstd"},
    {"\xfd\x37zXZ", "compressed by xz; unpack it with unxz"},
    {"BZh", "compressed by bzip2; unpack it with bunzip2"},
    {"\x04\x22\x4d\x18", "compressed by lz4; unpack it with unlz4"},
    {"version https://git-lfs", "a pointer of Git LFS to the file; git lfs pull gets it"},
    {"<!DOCTYPE html", kWebPage},
    {"<!doctype html", kWebPage},
    {"<html", kWebPage},
    {"<?xml", "XML, perhaps an error of the server it came from; download the file again"},
    {"\x93NUMPY", "a NumPy array without a name; save the arrays with safetensors.numpy.save_file"},
};

// Returns a clause about a file that must be unpacked or fetched first; empty if it is none.
std::string_view wrapping_of(const PathSnapshot& place) {
  const auto is_it = [&](const Signature& s) { return std::string_view(place.head()).starts_with(s.bytes); };
  const auto found = std::find_if(std::begin(kWrapped), std::end(kWrapped), is_it);
  return place.is_file() && found != std::end(kWrapped) ? found->advice : std::string_view();
}

// Returns the files in a directory by which other programs are known, with the owner of each.
Result<std::vector<std::string>> files_of_others(const PathSnapshot& directory) {
  constexpr std::size_t kLookedInto = 8;
  constexpr std::string_view kSnapshot = ".snapshot_metadata", kFlax = "checkpoint_";
  std::vector<std::string> out;
  const auto add = [&](std::string_view name, std::string_view owner) {
    if (!owner.empty()) out.push_back(printable(name) + " is " + std::string(owner));
  };
  std::size_t looked_into = 0;
  for (const DirectoryEntry& entry : directory.entries()) {
    if (entry.name == kSnapshot) continue;
    add(entry.name, owner_of_name(entry.name));
    if (entry.is_directory || !entry.name.starts_with(kFlax) || ++looked_into > kLookedInto) continue;
    const auto file = directory.inside(entry.name);
    if (file) add(entry.name, owner_of_bytes((*file)->head()));
  }
  if (TRY(directory.has_hidden_file(kSnapshot))) add(kSnapshot, owner_of_name(kSnapshot));
  return out;
}

// Returns whose files these are, in parentheses, or else the models in a directory of several.
Result<std::string> others_text(const PathSnapshot& place) {
  std::vector<std::string> told;
  if (place.is_directory()) told = TRY(files_of_others(place));
  if (place.is_file()) {
    std::string_view owner = owner_of_name(place.name());
    if (owner.empty()) owner = owner_of_bytes(place.head());
    if (!owner.empty()) told.push_back(printable(place.name()) + " is " + std::string(owner));
  }
  if (!told.empty()) return std::string(" (" + some_of(told) + ")");
  std::vector<std::string> models = place.is_directory() ? bin::usual_names(place) : std::vector<std::string>();
  for (std::string& name : models) name = printable(name);
  if (models.size() < 2) return std::string();
  return std::string(" (" + some_of(models) + ": open one of them by its path)");
}

}  // namespace

Result<std::optional<OpenCheckpoint>> open_if_known(const std::string& path, const OpenOptions& options) {
  forget_stored(path);
  return open_named(TRY(PathSnapshot::look(path)), options);
}

Result<std::vector<std::string>> files_if_complete(const std::string& path) {
  const auto open = TRY(open_if_known(path));
  if (!open) return corrupt(path + " is no longer a checkpoint");
  const Catalog& catalog = open->reader->catalog();
  std::vector<std::string> out;
  for (std::uint32_t f = 0; f < catalog.files.size(); ++f) {
    if (catalog.files[f].size < 0) return corrupt(catalog.files[f].path + " is missing");
    out.push_back(catalog.file_path(f));
  }
  // Trainers save it after the model, which can be converted without it.
  const PathSnapshot place = TRY(PathSnapshot::look(path));
  if (const std::string file = place.is_directory() ? TRY(unfinished_optimizer(place, catalog)) : ""; !file.empty())
    return corrupt(printable(file) + " is not complete");
  if (const std::string file = place.is_directory() ? awaited_file(place) : ""; !file.empty())
    return corrupt(file + " is not there yet, which Trainer writes last");
  return out;
}

Result<std::string> gap_of_checkpoint(const std::string& path) {
  const IoFailureWatch watch;
  const auto files = files_if_complete(path);
  if (!files && watch.may_be_io_failure_or_denial(files.error())) return files.error();
  return files ? std::string() : files.error().message();
}

namespace {

// Returns the directory of one tensor-parallel rank in fairseq2's tree (step_4/model/pp_00/tp_00/sdp_00.pt), in or
// below that of a run, a step or a model. Null if there is none.
Result<const PathSnapshot*> fairseq2_rank(const PathSnapshot& place) {
  if (!place.is_directory()) return nullptr;
  if (place.has_file("sdp_00.pt")) return &place;
  for (const std::string_view inner : {"tp_00", "pp_00", "model", "checkpoints"})
    if (place.has_directory(inner)) return fairseq2_rank(*TRY(place.inside(inner)));
  const auto is_step = [](const DirectoryEntry& e) { return e.is_directory && e.name.starts_with("step_"); };
  const auto step = std::find_if(place.entries().rbegin(), place.entries().rend(), is_step);
  return step == place.entries().rend() ? nullptr : fairseq2_rank(*TRY(place.inside(step->name)));
}

// Says what to open instead of fairseq2's tree. Its files do not record how their tensors were cut.
Result<std::string> advice_for_fairseq2(const PathSnapshot& rank) {
  const PathSnapshot *const stage = TRY(rank.parent()), *const stages = TRY(stage->parent());
  if (stage->has_directory("tp_01") || stages->has_directory("pp_01"))
    return std::string(
        "its files hold parts of tensors and do not record how they were cut. Open the Hugging Face model that "
        "fairseq2 exports (export_hugging_face)");
  if (!rank.has_file("sdp_01.pt")) return "open " + printable(path_join(rank.path(), "sdp_00.pt"));
  return "open " + printable(rank.path()) +
         " with a --source-layout that cuts dimension 0 of each tensor over dp_shard (docs/formats/ranks.md)";
}

}  // namespace

namespace {

Result<std::string> newest_complete(const std::vector<std::string>& checkpoints, const GapOf& gap_of) {
  std::string gap_of_last;
  for (auto c = checkpoints.rbegin(); c != checkpoints.rend(); ++c) {
    const std::string gap = TRY(gap_of(*c));
    if (gap.empty()) return *c;
    if (gap_of_last.empty()) gap_of_last = gap;
  }
  return corrupt("none of them complete; the last: " + gap_of_last);
}

}  // namespace

Result<NewestOfRun> newest_of_run(const std::vector<std::string>& checkpoints, const GapOf& gap_of) {
  std::string newest = TRY(newest_complete(checkpoints, gap_of));
  std::vector<std::string> models = TRY(sibling_models(newest, checkpoints));
  if (models.empty()) return NewestOfRun{std::move(newest), ""};
  for (std::string& model : models) model = printable(model);
  return NewestOfRun{
      "", (models.size() == checkpoints.size()
               ? "a directory of several models"
               : "the newest of " + count_of(std::ssize(checkpoints), "checkpoint") + " are several models") +
              "; name one of them: " + some_of(models)};
}

namespace {

// Says what to open instead of the directory of a training run; empty if nothing below it is a checkpoint, or if it has
// several files of models, which others_text() lists.
Result<std::string> advice_for_run(const PathSnapshot& place) {
  const std::string& path = place.path();
  const IoFailureWatch watch;
  const auto found = checkpoints_of_run(path);
  if (!found && watch.may_be_io_failure(found.error())) return found.error();
  if (!found || found->empty()) return std::string();
  if (place.is_directory() && bin::usual_names(place).size() > found->size()) return std::string();
  const auto newest = newest_of_run(*found);
  if (!newest && newest.error().code() == ErrorCode::kIo) return newest.error();
  if (newest && newest->path.empty()) return newest->choice;
  return "a directory of " + count_of(std::ssize(*found), "checkpoint") + "; " +
         (newest ? "the newest complete one is " + printable(newest->path) : newest.error().message());
}

}  // namespace

Result<OpenCheckpoint> open_checkpoint(const std::string& path, const OpenOptions& options) {
  if (const std::string plain = without_secret_query(path); plain != path) return open_checkpoint(plain, options);
  forget_stored(path);
  if (!TRY(path_exists(path))) return io_error(path + ": not found");
  const PathSnapshot place = TRY(PathSnapshot::look(path));
  if (place.is_directory() && place.entries().empty())
    return io_error(path + ": an empty directory, or one whose file system is not mounted");
  if (auto open = TRY(open_named(place, options))) return std::move(*open);
  if (const PathSnapshot* const rank = TRY(fairseq2_rank(place)))
    return unsupported(path + ": a fairseq2 checkpoint; " + TRY(advice_for_fairseq2(*rank)));
  if (const std::string advice = TRY(advice_for_run(place)); !advice.empty()) return unsupported(path + ": " + advice);
  if (!place.is_directory()) TRY(File::open(path));  // fails for a dangling link or a device
  if (const std::string_view wrapping = wrapping_of(place); !wrapping.empty())
    return unsupported(path + ": " + std::string(wrapping));
  std::vector<std::string> titles;
  for (const Format* f : formats())
    if (f->open && !f->write_view) titles.emplace_back(f->title);  // a view is read as the format that it presents
  return unsupported(path + ": unrecognised format" + TRY(others_text(place)) + "; supported: " + join(titles, ", "));
}

Result<std::vector<std::string>> files_of_checkpoint(const std::string& directory) {
  if (auto recorded = TRY(files_of_manifest(directory))) return std::move(*recorded);
  std::set<std::string> own;
  const auto open = TRY(open_checkpoint(directory, {.files_too = false, .validated = false}));
  const Catalog& catalog = open.reader->catalog();
  const std::string inside = path_join(directory, "");  // some have their files in a subdirectory
  const std::string below = catalog.root.starts_with(inside) ? catalog.root.substr(inside.size()) : std::string();
  const auto add = [&](const std::string& name) {
    own.insert(std::filesystem::path(below.empty() ? name : path_join(below, name)).lexically_normal().string());
  };
  const auto is_own = open.format->is_own_file;
  for (const CatalogFile& file : catalog.files)
    if (!is_own || is_own(catalog, file.path)) add(file.path);
  for (const std::string& name : catalog.metadata_files) add(name);
  if (!catalog.latest_file.empty()) add(catalog.latest_file);
  std::set<std::string> places = {""};
  for (const std::string& file : own) places.insert(file.substr(0, file.rfind('/') + 1));  // npos + 1 is 0
  for (const std::string& place : places) {
    for (const Format* format : formats())
      for (const std::string_view name : format->side_files) own.insert(place + std::string(name));
    own.insert(place + std::string(kConfigFile));
    own.insert(place + std::string(kManifestFile));
  }
  return std::vector<std::string>(own.begin(), own.end());
}

}  // namespace reshard

// Directories of training runs. See run.h.
#include "formats/run.h"

#include <algorithm>
#include <array>

#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::string_view kModelPart = "pytorch_model_fsdp_", kOptimizerPart = "optimizer_";
constexpr std::size_t kMaxSteps = 10'000;  // directories that are looked into

bool is_part(const DirectoryEntry& entry, std::string_view kind) {
  std::string_view name = entry.name;
  return entry.is_directory && take(name, kind) && is_digits(name);
}

bool has_parts(const std::string& path) {
  const auto entries = list_directory(path);
  return entries && std::any_of(entries->begin(), entries->end(), [](const auto& e) { return is_part(e, kModelPart); });
}

// Several checkpoints in directories of one, as one: their files, tensors and objects side by side.
class JoinedReader : public Reader {
 public:
  explicit JoinedReader(const std::string& path) { catalog_.root = path; }

  // `optimizer`: what its names are to begin with, "optimizer_1", where they all begin with "optimizer".
  Status add(const std::string& directory, std::unique_ptr<Reader> reader, const std::string& optimizer) {
    reader->use_files(files_);
    parts_.push_back({directory, std::move(reader), {}});
    Part& part = parts_.back();
    const Catalog& from = part.reader->catalog();
    add_new_files(part);
    for (std::size_t i = 0; i < from.tensors().size(); ++i) {
      Tensor tensor = in_joined_files(part, from.tensors()[i]);
      rename(tensor, optimizer);
      tensors_.emplace(tensor.name, std::pair(parts_.size() - 1, i));
      TRY(catalog_.add(std::move(tensor)));
    }
    for (std::size_t i = 0; i < from.blobs.size(); ++i) {
      Blob blob = from.blobs[i];
      blob.extent.file = part.file_of[blob.extent.file];
      for (Extent& copy : blob.copies) copy.file = part.file_of[copy.file];
      rename(blob, optimizer);
      blobs_.emplace(blob.name, std::pair(parts_.size() - 1, i));
      catalog_.blobs.push_back(std::move(blob));
    }
    for (const std::string& file : from.metadata_files) catalog_.metadata_files.push_back(path_join(directory, file));
    for (const std::string& file : from.stale_files) catalog_.stale_files.push_back(path_join(directory, file));
    for (const std::string& warning : from.warnings) catalog_.warnings.push_back(directory + ": " + warning);
    for (const std::string& note : from.notes) catalog_.notes.push_back(directory + ": " + note);
    catalog_.shares_extents = catalog_.shares_extents || from.shares_extents;
    if (parts_.size() == 1) catalog_.attributes = from.attributes;
    return {};
  }

  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override {
    struct Wanted {
      std::vector<std::size_t> own, joined;  // places in the part's catalog, and in the joined one
    };
    std::vector<Wanted> wanted(parts_.size());
    for (const std::size_t i : tensors) {
      const auto [part, own] = tensors_.at(catalog_.tensors()[i].name);
      wanted[part].own.push_back(own);
      wanted[part].joined.push_back(i);
    }
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      Part& part = parts_[p];
      TRY(part.reader->locate(wanted[p].own, threads, spool));
      add_new_files(part);
      for (std::size_t n = 0; n < wanted[p].own.size(); ++n) {
        Tensor found = in_joined_files(part, part.reader->catalog().tensors()[wanted[p].own[n]]);
        Tensor& tensor = catalog_.tensor(wanted[p].joined[n]);
        tensor.fragments = found.fragments;
        tensor.replicas = found.replicas;
        tensor.dtype = found.dtype;
        tensor.located = found.located;
      }
    }
    return {};
  }

  Result<std::string> blob_bytes(const Blob& blob) override {
    const auto [reader, own] = origin_of(blob);
    return reader->blob_bytes(*own);
  }

  std::string describe(const Blob& blob) override {
    const auto [reader, own] = origin_of(blob);
    return reader->describe(*own);
  }

 private:
  struct Part {
    std::string directory;
    std::unique_ptr<Reader> reader;
    std::vector<std::uint32_t> file_of;  // in the joined catalog
  };

  // Those it has now and had not before: a place for what is decoded comes with the first item that needs it.
  void add_new_files(Part& part) {
    const auto& files = part.reader->catalog().files;
    for (std::size_t f = part.file_of.size(); f < files.size(); ++f) {
      part.file_of.push_back(static_cast<std::uint32_t>(catalog_.files.size()));
      catalog_.files.push_back({path_join(part.directory, files[f].path), files[f].size, files[f].writer});
    }
    for (std::size_t f = 0; f < files.size(); ++f) catalog_.files[part.file_of[f]].size = files[f].size;
  }

  static FragmentList moved(const Part& part, FragmentList list) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      Extent extent = list.extent(i);
      extent.file = part.file_of[extent.file];
      list.set_extent(i, extent);
    }
    return list;
  }

  static Tensor in_joined_files(const Part& part, Tensor tensor) {
    tensor.fragments = moved(part, tensor.fragments);
    tensor.replicas = moved(part, tensor.replicas);
    return tensor;
  }

  template <class Named>
  static void rename(Named& named, const std::string& optimizer) {
    constexpr std::string_view kWritten = "optimizer.";
    if (optimizer.empty() || !named.name.starts_with(kWritten)) return;
    named.name = optimizer + "." + named.name.substr(kWritten.size());
    named.path = {named.name};
  }

  std::pair<Reader*, const Blob*> origin_of(const Blob& blob) const {
    const auto& [part, i] = blobs_.at(blob.name);
    return {parts_[part].reader.get(), &parts_[part].reader->catalog().blobs[i]};
  }

  std::vector<Part> parts_;
  // Of each, by its name: its part, and its place there.
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>> tensors_, blobs_;
};

}  // namespace

Result<std::optional<OpenCheckpoint>> open_parts(const std::string& path, const OpenOptions& options) {
  if (!is_directory(path)) return std::optional<OpenCheckpoint>();
  std::vector<std::string> models, optimizers;
  for (const DirectoryEntry& entry : TRY(list_directory(path))) {
    if (is_part(entry, kModelPart)) models.push_back(entry.name);
    if (is_part(entry, kOptimizerPart)) optimizers.push_back(entry.name);
  }
  if (models.empty()) return std::optional<OpenCheckpoint>();
  std::sort(models.begin(), models.end(), natural_less);
  std::sort(optimizers.begin(), optimizers.end(), natural_less);
  if (models.size() > 1)
    return unsupported(path + ": holds " + count_of(std::ssize(models), "model") +
                       ", and a checkpoint is of one; open " + path_join(path, models[0]) + " or another of them");
  OpenCheckpoint out;
  auto joined = std::make_unique<JoinedReader>(path);
  for (const auto* names : {&models, &optimizers})
    for (const std::string& name : *names) {
      const std::string part = path_join(path, name);
      const Format* format = recognised_format(part);
      if (!format) return corrupt(part + ": is empty, or not what was saved there: the save did not finish");
      if (!out.format) out.format = format;
      const bool is_one_of_many = names == &optimizers && optimizers.size() > 1;
      TRY(joined->add(name, TRY(format->open(part, options)), is_one_of_many ? name : ""));
    }
  joined->catalog().lacks_optimizer = optimizers.empty();
  joined->catalog().sort_by_name();
  out.reader = std::move(joined);
  return std::optional(std::move(out));
}

Result<std::vector<std::string>> checkpoints_of_run(const std::string& path) {
  std::vector<std::string> out;
  std::vector<std::string> level = {path};
  for (int depth = 0; depth < 2 && out.empty(); ++depth) {
    std::vector<std::string> next;
    for (const std::string& directory : level)
      for (const DirectoryEntry& entry : TRY(list_directory(directory)))
        if (entry.is_directory && next.size() < kMaxSteps) next.push_back(path_join(directory, entry.name));
    std::sort(next.begin(), next.end(), natural_less);
    std::copy_if(next.begin(), next.end(), std::back_inserter(out),
                 [](const std::string& child) { return recognised_format(child) || has_parts(child); });
    level = std::move(next);
  }
  return out;
}

std::string gap_of_checkpoint(const std::string& path) {
  const auto open = open_if_known(path);
  if (!open) return open.error().message();
  if (!*open) return path + ": is no checkpoint any more";
  for (const CatalogFile& file : (*open)->reader->catalog().files)
    if (file.size < 0) return file.path + " is missing";
  return {};
}

Result<std::string> newest_complete(const std::vector<std::string>& checkpoints) {
  std::string gap_of_last;
  for (auto c = checkpoints.rbegin(); c != checkpoints.rend(); ++c) {
    const std::string gap = gap_of_checkpoint(*c);
    if (gap.empty()) return *c;
    if (gap_of_last.empty()) gap_of_last = gap;
  }
  return corrupt("none of them complete; the last: " + gap_of_last);
}

std::string advice_for_run(const std::string& path) {
  const auto found = checkpoints_of_run(path);
  if (!found || found->empty()) return {};
  const auto newest = newest_complete(*found);
  return "a directory of " + count_of(std::ssize(*found), "checkpoint") + "; " +
         (newest ? "the newest complete one is " + printable(*newest) : newest.error().message());
}

}  // namespace reshard

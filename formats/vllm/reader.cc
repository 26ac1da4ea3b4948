#include "formats/tensor_files/reader.h"

#include <map>
#include <set>

#include "formats/vllm/layout.h"
#include "formats/vllm/vllm.h"
#include "lib/base/text.h"
#include "lib/model/family.h"

namespace reshard::vllm {
namespace {

// Joins the parameters of the workers to the model that the config.json beside them describes.
class VllmReader : public TensorFileReader {
 public:
  Status open(const std::string& path, const OpenOptions& options) {
    catalog_.root = path;
    for (Index worker = 0; worker == 0 || path_exists(path_join(path, file_name(worker, 0))); ++worker)
      TRY(read_worker(worker, options));
    const VllmLayout layout = TRY(find_layout());
    for (const TargetTensor& t : layout.request().tensors) tensors_.emplace_back(t);
    for (const VllmLayout::Stack& p : layout.parameters())
      for (Index worker = 0; worker < layout.workers(); ++worker)
        TRY(add_parameter(TRY(layout.local(p, worker)), worker));
    for (JoinedTensor& t : tensors_) TRY(catalog_.add(std::move(t.tensor)));
    catalog_.attributes.emplace_back("format", "vLLM sharded_state of " + count_of(layout.workers(), "worker"));
    return finish(options);
  }

 private:
  struct Part {
    std::uint32_t file = 0;
    StoredTensor stored;
  };

  Status read_worker(Index worker, const OpenOptions& options) {
    parts_.emplace_back();
    for (Index part = 0; part == 0 || path_exists(path_join(catalog_.root, file_name(worker, part))); ++part) {
      const OpenFile opened = TRY(open_file(file_name(worker, part), options));
      catalog_.files[opened.file].writer = worker;
      for (const TensorFile::Entry& entry : opened.content->tensors())
        if (!parts_.back().emplace(entry.name, Part{opened.file, entry.tensor}).second)
          return corrupt(catalog_.file_path(opened.file) + ": " + tensor_text(entry.name) +
                         " is in another part of worker " + std::to_string(worker) + " too");
    }
    return {};
  }

  // That of the tensors which worker 0 has.
  Result<VllmLayout> find_layout() const {
    const std::string path = find_config(catalog_);
    if (path.empty())
      return unsupported(catalog_.root +
                         ": expected a config.json beside vLLM's sharded_state, which says how its parameters are "
                         "stacked; got none");
    const ModelConfig config = TRY(read_config(path));
    const Family* family = family_of_model_type(config.model_type);
    if (!family) return unsupported(path + ": model_type '" + printable(config.model_type) + "' is of no family known");
    const auto& stored = parts_.front();
    const bool is_tied = !stored.contains(kEmbedding);
    LayoutRequest request;
    request.mesh = Mesh({{"tp", static_cast<Index>(parts_.size())}});
    request.heads = HeadCounts{config.num_attention_heads(), config.num_key_value_heads()};
    std::set<std::string_view> used;
    for (const Parameter& p : TRY(parameters(*family, config))) {
      const auto known = find_rule(p.name);
      const auto found = known ? stored.find(is_tied && p.name == kEmbedding ? kHead : known->parameter) : stored.end();
      if (found == stored.end() || (is_tied && p.name == kHead)) continue;
      used.insert(found->first);
      request.tensors.push_back({p.name, found->second.stored.dtype, p.shape, {p.name}, {}});
    }
    for (const auto& [name, part] : stored)
      if (!used.contains(name) && !is_scale(name))
        return unsupported(catalog_.file_path(part.file) + ": " + tensor_text(name) + " is no parameter that " + path +
                           " describes");
    return VllmLayout::make(std::move(request)).context(catalog_.root);
  }

  Status add_parameter(const LocalTensor& local, Index worker) {
    const auto& stored = parts_[static_cast<std::size_t>(worker)];
    const auto found = stored.find(local.name);
    const std::string what = "worker " + std::to_string(worker) + ": " + tensor_text(local.name) + ": expected ";
    if (found == stored.end()) return corrupt(catalog_.root + ": " + what + "it, as worker 0 has it; it is not there");
    const auto& [file, tensor] = found->second;
    if (tensor.shape() != local.shape || tensor.dtype != local.dtype)
      return corrupt(catalog_.file_path(file) + ": " + what + std::string(info(local.dtype).torch_name) +
                     to_string(local.shape) + " by the config.json, got " + std::string(info(tensor.dtype).torch_name) +
                     to_string(tensor.shape()));
    for (const LocalPart& part : local.parts)
      tensors_[part.tensor].add(local.shape, part.place, {file, tensor.extent.offset, tensor.extent.length});
    return {};
  }

  std::vector<std::map<std::string, Part, std::less<>>> parts_;  // of each worker, by name
  std::vector<JoinedTensor> tensors_;                            // of the request
};

}  // namespace

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options) {
  auto reader = std::make_unique<VllmReader>();
  TRY(reader->open(path, options));
  return std::unique_ptr<Reader>(std::move(reader));
}

}  // namespace reshard::vllm

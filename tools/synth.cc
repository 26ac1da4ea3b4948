// SPDX-License-Identifier: Apache-2.0
// reshard synth: writes a synthetic checkpoint.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "formats/open.h"
#include "lib/base/file.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/image/image_upload.h"
#include "lib/model/config.h"
#include "lib/model/family_file.h"
#include "lib/model/model.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"
#include "lib/model/placement.h"
#include "lib/model/view.h"
#include "lib/source/computed_source.h"
#include "lib/source/pattern_source.h"
#include "tools/commands.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

struct KnownModel {
  std::string_view name;
  Index vocab, hidden, layers, heads, key_value_heads, intermediate;
};

// meta-llama's published sizes. The 1B model ties its head to the embedding; here it has a separate head.
constexpr std::array<KnownModel, 5> kModels = {{
    {"llama3-tiny", 512, 128, 2, 16, 8, 384},
    {"llama3-1b", 128256, 2048, 16, 32, 8, 8192},
    {"llama3-8b", 128256, 4096, 32, 32, 8, 14336},
    {"llama3-70b", 128256, 8192, 80, 64, 8, 28672},
    {"llama3-405b", 128256, 16384, 126, 128, 8, 53248},
}};

struct SynthOptions {
  std::string destination, model, config, family_file, to, mesh, names, dtype, state;
  std::vector<std::string> shapes, without;
  Index layers = 0;
  bool optimizer = false, metadata_only = false, headers_only = false, force = false;
  ResourceOptions resources;
};

std::vector<std::string> model_names() {
  std::vector<std::string> out;
  for (const KnownModel& m : kModels) out.emplace_back(m.name);
  return out;
}

Result<KnownModel> find_model(const SynthOptions& options) {
  for (KnownModel m : kModels) {
    if (options.layers > 0) m.layers = options.layers;
    if (m.name == options.model) return m;
  }
  return unknown_word("model", options.model, model_names());
}

// Returns the formats that synth can write: those of directories.
std::vector<std::string> targets() {
  std::vector<std::string> out;
  for (const Format* f : written_formats())
    if (f->lay_out && !f->is_file) out.emplace_back(f->name);
  return out;
}

// Returns --names or the format's usual names. Formats without usual names get torchtitan's if the family has those,
// and transformers' otherwise.
Result<Convention> convention_of(const SynthOptions& options, const Family& family) {
  const Format* format = TRY(find_format(options.to));
  if (options.names.empty() && format->own_names.empty() && !format->hf_names)
    return family.has_convention(Convention::kTorchtitan) ? Convention::kTorchtitan : Convention::kTransformers;
  const std::string_view usual = format->own_names.empty() ? "hf" : format->own_names;
  const std::string text(options.names.empty() ? usual : options.names);
  if (const auto convention = find_convention(text)) return *convention;
  return unknown_word("naming convention", text, convention_options());
}

Result<DType> read_dtype(const std::string& text) {
  const auto dtype = dtype_from_user(text);
  if (dtype && is_floating(*dtype) && *dtype != DType::kFloat64) return *dtype;
  return unknown_dtype(text, {"float32", "bfloat16", "float16"});
}

Json config_json(const KnownModel& m, DType dtype) {
  return Json::object()
      .set("architectures", Json::array().push_back("LlamaForCausalLM"))
      .set("attention_bias", false)
      .set("head_dim", m.hidden / m.heads)
      .set("hidden_act", "silu")
      .set("hidden_size", m.hidden)
      .set("initializer_range", 0.02)
      .set("intermediate_size", m.intermediate)
      .set("max_position_embeddings", 8192)
      .set("mlp_bias", false)
      .set("model_type", "llama")
      .set("num_attention_heads", m.heads)
      .set("num_hidden_layers", m.layers)
      .set("num_key_value_heads", m.key_value_heads)
      .set("rms_norm_eps", 1e-05)
      .set("rope_theta", 500000.0)
      .set("tie_word_embeddings", false)
      .set("torch_dtype", info(dtype).torch_name)
      .set("vocab_size", m.vocab);
}

// The model to imitate, as its config.json describes it.
struct Subject {
  Json config_file;
  ModelConfig config;
  const Family* family = nullptr;
  DType dtype = DType::kBFloat16;
};

Result<Subject> find_subject(const SynthOptions& options) {
  Subject s;
  s.dtype = TRY(read_dtype(options.dtype.empty() ? "bfloat16" : options.dtype));
  if (options.config.empty() == options.model.empty()) return usage_error("expected either --model or --config");
  if (options.config.empty()) {
    s.config_file = config_json(TRY(find_model(options)), s.dtype);
  } else {
    s.config_file = TRY(parse_json(TRY(read_whole_file(options.config, kMaxConfigBytes)), options.config));
    if (options.layers > 0) s.config_file.set("num_hidden_layers", options.layers);
  }
  Families families;
  if (!options.family_file.empty()) families = Families(TRY(load_family(options.family_file)));
  s.config = TRY(ModelConfig::parse(s.config_file, options.config.empty() ? "config.json" : options.config, families));
  s.family = &numbered(*TRY(family_of(s.config)), &s.config);
  // Without --dtype the config's dtype is used.
  if (const auto declared = dtype_from_torch(s.config.dtype); declared && options.dtype.empty()) s.dtype = *declared;
  s.config.dtype = info(s.dtype).torch_name;
  return s;
}

// "model.embed_tokens.weight=16064x8192"
Result<std::pair<std::string, Dims>> parse_shape(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const auto bad = [&] { return usage_error("--shape '" + printable(text) + "': expected NAME=16064x8192"); };
  if (equals == std::string::npos || equals == 0) return bad();
  Dims shape;
  for (const std::string& part : split(std::string_view(text).substr(equals + 1), 'x')) {
    const auto n = parse_bytes(part);
    if (!n || *n < 1 || shape.rank() == kMaxRank) return bad();
    shape.push_back(*n);
  }
  if (!checked_volume(shape)) return bad();
  return std::pair(text.substr(0, equals), shape);
}

// Returns the model under its canonical names, with Adam's state and the faults that the options request, and divided
// as the view of the target is.
Result<Catalog> model_catalog(const Subject& subject, const SynthOptions& options) {
  std::vector<std::pair<std::string, Dims>> reshaped;
  for (const std::string& text : options.shapes) reshaped.push_back(TRY(parse_shape(text)));
  std::vector<bool> used(reshaped.size());
  Catalog catalog;
  const auto add = [&](std::string name, DType type, Dims shape) -> Status {
    if (any_glob_matches(options.without, name)) return {};
    for (std::size_t i = 0; i < reshaped.size(); ++i)
      if (glob_match(reshaped[i].first, name)) {
        shape = reshaped[i].second;
        used[i] = true;
      }
    Tensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = type;
    tensor.shape = shape;
    return catalog.add(std::move(tensor));
  };
  for (const Parameter& p : TRY(parameters(*subject.family, subject.config))) {
    if (p.is_tied) continue;
    TRY(add(p.name, dtype_from_torch(p.dtype).value_or(subject.dtype), p.shape));
    if (!options.optimizer) continue;
    for (const std::string_view moment : {kMomentSuffix, kSecondMomentSuffix})
      TRY(add("optimizer.state." + p.name + std::string(moment), DType::kFloat32, p.shape));
    TRY(add("optimizer.state." + p.name + std::string(kStepSuffix), DType::kFloat32, {}));
  }
  for (std::size_t i = 0; i < used.size(); ++i)
    if (!used[i]) return usage_error("--shape: the model has no " + tensor_text(reshaped[i].first));
  catalog.sort_by_name();
  TRY(divide_columns(catalog, *subject.family, TRY(convention_of(options, *subject.family))));
  return catalog;
}

// The elements of the tensors: a pattern (pattern_source.h), except Adam's step count, which is the same for all.
class SynthSource : public ComputedSource {
 public:
  explicit SynthSource(PatternSource& pattern) : ComputedSource(pattern.catalog(), pattern) {
    const auto& tensors = catalog().tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].shape.rank() == 0 && split_state_key(tensors[i].name).suffix == kStepSuffix) set(i, fill_steps);
  }

 private:
  static Status fill_steps(const Box&, MutableBytes out, MutableBytes) {
    constexpr float kSteps = 1000;
    std::memcpy(out.data(), &kSteps, sizeof kSteps);
    return {};
  }
};

// The metadata of a target: its files without tensors or, if all have some, the last one.
class MetadataOnly : public Target {
 public:
  explicit MetadataOnly(const Target& whole) : whole_(whole), numbers_(whole.catalog().files.size()) {
    const std::vector<CatalogFile>& files = whole.catalog().files;
    std::vector<bool> has_tensors(files.size());
    for (const Tensor& tensor : whole.catalog().tensors())
      for (std::size_t i = 0; i < tensor.fragments.size(); ++i) has_tensors[tensor.fragments.extent(i).file] = true;
    if (std::find(has_tensors.begin(), has_tensors.end(), false) == has_tensors.end()) has_tensors.back() = false;
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (has_tensors[i]) continue;
      numbers_[i] = static_cast<std::uint32_t>(catalog_.files.size());
      catalog_.files.push_back(files[i]);
    }
  }
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes& emit) const override {
    const PayloadCrc no_payload = [](const Extent&) { return 0u; };
    return whole_.seal(no_payload, [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
      return numbers_[file] ? emit(*numbers_[file], offset, bytes) : Status();
    });
  }

 private:
  const Target& whole_;
  std::vector<std::optional<std::uint32_t>> numbers_;  // of the whole's files, those that are kept
};

// A target without its tensor data.
class HeadersOnly : public Target {
 public:
  explicit HeadersOnly(const Target& whole) : whole_(whole) { catalog_ = whole.catalog(); }
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes& emit) const override {
    return whole_.seal([](const Extent&) { return 0u; }, emit);
  }

 private:
  const Target& whole_;
};

// Returns the tensors of the model as a naming convention stores them.
Result<Catalog> stored_catalog(const Catalog& model, const Family& family, const ModelConfig& config,
                               Convention convention) {
  std::vector<std::size_t> all(model.tensors().size());
  std::iota(all.begin(), all.end(), 0);
  Catalog out;
  for (const PackedGroup& group : TRY(pack(family, convention, model, all))) {
    std::vector<Dims> shapes;
    for (const std::size_t part : group.parts) shapes.push_back(model.tensors()[part].joined_shape());
    Tensor t;
    t.name = group.name;
    t.dtype = model.tensors()[group.parts[0]].dtype;
    t.shape = shapes[0];
    if (group.stored && shapes[0].rank() > 0) t.shape = TRY(packed_shape(*group.stored, shapes, &config));
    TRY(out.add(std::move(t)));
  }
  return out;
}

Result<std::unique_ptr<Target>> lay_out(const Catalog& model, const Subject& subject, const SynthOptions& options) {
  LayoutRequest request;
  request.config = subject.config_file;
  request.heads = HeadCounts{subject.config.num_attention_heads(), subject.config.num_key_value_heads()};
  if (!options.mesh.empty()) request.mesh = TRY(Mesh::parse(options.mesh));
  const Convention convention = TRY(convention_of(options, *subject.family));
  if (!subject.family->has_convention(convention))
    return unsupported("family " + std::string(subject.family->name) + " has no " +
                       std::string(info(convention).title));
  const Catalog stored = TRY(stored_catalog(model, *subject.family, subject.config, convention));
  const Placer placer = TRY(Placer::make(request.mesh, subject.family, &subject.config, Placer::of(stored)));
  for (const Tensor& t : stored.tensors())
    request.tensors.push_back({t.name, t.dtype, t.shape, {}, placer.place(Placer::of(t))});
  const Format* format = TRY(find_format(options.to));
  if (!format->lay_out || format->is_file)
    return usage_error("--to " + options.to + ": expected a format of directories: " + join(targets(), ", "));
  return format->lay_out(std::move(request));
}

// Values are generated in canonical row order, so that names and mesh do not change the model.
Result<Catalog> generated_view(const Target& target, const Subject& subject) {
  return canonical_view(target.catalog(), {subject.family, &subject.config, true, false, true}, nullptr);
}

// Writes the model to a bucket. `written` is `target`, or a part of it without tensors.
Status upload(const SynthOptions& options, const Subject& subject, SynthSource& source, const Target& written,
              const Target& target, const RunOptions& run) {
  if (options.headers_only)
    return usage_error(options.destination + ": a bucket has no sparse files; --headers-only needs a local path");
  const Catalog view = options.metadata_only ? Catalog() : TRY(generated_view(target, subject));
  const Plan plan = options.metadata_only ? Plan() : TRY(make_plan(source.catalog(), view));
  const Upload::Memory memory =
      Upload::plan_memory(run.memory - held_bytes(), Upload::part_bytes(written.catalog()), false);
  const WatchedFiles watched({});
  const auto image = TRY(Image::create({plan, source, written, view, watched}, run, memory.bytes));
  const std::string config = python_text(subject.config_file);
  image->add_text({image->add_file("config.json", std::ssize(config)), 0, std::ssize(config)},
                  [&config]() -> Result<std::string> { return config; });
  const ImageFiles files = files_to_upload(*image, written);
  const Upload::Source from = source_of(*image, files);
  const auto output = TRY(Upload::create(
      {options.destination, options.force ? files_of_checkpoint : nullptr, {options.config}, options.state},
      files.files, {.resume = Resume::kNever, .interrupt = run.interrupt, .workers = memory.workers}));
  Progress progress("writing", plan.bytes_written, options.resources.quiet);
  const auto write = [&]() -> Status {
    TRY(output->send(from, [&](Index done) { progress.update(done); }));
    return output->publish(from);
  };
  const Status done = write();
  return done ? Status() : output->give_up(done.error());
}

void print_done(const SynthOptions& options, std::chrono::steady_clock::time_point start) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_row("done",
            options.destination + "   " + human_seconds(seconds) + "   peak memory " + human_bytes(peak_memory()));
}

Result<int> synth(const SynthOptions& options) {
  if (options.metadata_only && options.headers_only)
    return usage_error("--metadata-only and --headers-only exclude each other; give one of them");
  TRY(check_state(options.state, options.destination));
  if (is_url(options.destination)) TRY(check_is_bucket(options.destination));
  const auto start = std::chrono::steady_clock::now();
  const Subject subject = TRY(find_subject(options));
  RunOptions run = TRY(options.resources.run_options());
  PatternSource pattern(TRY(model_catalog(subject, options)));
  SynthSource source(pattern);
  const auto target = TRY(lay_out(source.catalog(), subject, options));
  const bool quiet = options.resources.quiet;
  Index fragments = 0;
  for (const Tensor& t : target->catalog().tensors()) fragments += std::ssize(t.fragments);
  if (!quiet) {
    print_row("model", (options.model.empty() ? options.config : options.model) + "   " +
                           count_of(std::ssize(source.catalog().tensors()), "tensor") + ", " +
                           human_bytes(source.catalog().tensor_bytes()) + " in " + count_of(fragments, "shard"));
    std::fflush(stdout);
  }

  MetadataOnly metadata(*target);
  HeadersOnly headers(*target);
  Target& written = options.metadata_only  ? static_cast<Target&>(metadata)
                    : options.headers_only ? static_cast<Target&>(headers)
                                           : *target;
  if (is_url(options.destination)) {
    TRY(upload(options, subject, source, written, *target, run));
    if (!quiet) print_done(options, start);
    return 0;
  }
  auto output =
      TRY(Output::create({options.destination, options.force ? files_of_checkpoint : nullptr, {options.config}},
                         written, options.headers_only ? Output::Space::kSparse : Output::Space::kReserved));
  if (!options.metadata_only && !options.headers_only) {
    const Catalog view = TRY(generated_view(*target, subject));
    const Plan plan = TRY(make_plan(source.catalog(), view));
    Progress progress("writing", plan.bytes_written, quiet);
    run.progress = [&](Index done) { progress.update(done); };
    TRY(copy_tensors(plan, source, view, *output, run));
  }
  TRY(output->add_file("config.json", python_text(subject.config_file)));
  TRY(output->commit());
  if (!quiet) print_done(options, start);
  return 0;
}

}  // namespace

void add_synth(CommandLine& line) {
  auto options = std::make_shared<SynthOptions>();
  line.add_option("DST", options->destination, "Directory to create").written(Option::Outputs::kBucketsToo).required();
  line.group("Model");
  line.add_option("--model", options->model, "Model to imitate").takes("NAME").common().suggests(model_names());
  line.add_option("--config", options->config, "Imitate the model of this config.json instead").common().read();
  line.add_option("--family-file", options->family_file, "Read a model family of your own from a JSON file").read();
  options->to = (*std::find_if(formats().begin(), formats().end(), [](const Format* f) {
                  return f->lay_out && f->own_names.empty();
                }))->name;
  line.group("Target");
  line.add_option("--to", options->to, "Format to write").takes("FORMAT").common().suggests(targets()).shows_default();
  line.add_option("--mesh", options->mesh, "Mesh of the ranks that save it, e.g. tp=8,pp=2 (default: one rank)")
      .takes("MESH")
      .common();
  line.add_option("--names", options->names, "Naming convention (default: the format's, torchtitan or transformers)")
      .takes("CONVENTION")
      .suggests(convention_options());
  line.add_option("--dtype", options->dtype, "Dtype of the weights (default: the config's, or bfloat16)")
      .takes("DTYPE")
      .suggests({"float32", "bfloat16", "float16"});
  line.add_option("--layers", options->layers, "Number of layers (default: the model's)").common().within(1, 10'000);
  line.add_flag("--optimizer", options->optimizer, "Add Adam's state of each parameter").common();
  line.add_flag("--metadata-only", options->metadata_only, "Write the metadata and config.json only");
  line.add_flag("--headers-only", options->headers_only, "Write sparse files: full length, no tensor data");
  line.add_option("--shape", options->shapes, "Change a tensor's shape: NAME=16064x8192").takes("NAME=SHAPE");
  line.add_option("--without", options->without, "Leave out tensors whose Hugging Face names match").takes("GLOB");
  line.add_flag("--force", options->force, "Replace the destination if it is a checkpoint").common();
  options->resources.add(line);
  line.option("--transport").hidden();
  add_state(line, options->state);
  line.examples({{"reshard synth tiny --model llama3-tiny --mesh tp=2,dp_shard=2", "1 MB in four files"},
                 {"reshard synth step-0 --model llama3-1b --mesh tp=8 --optimizer", "18 GB, with Adam's state"},
                 {"reshard synth big --model llama3-405b --mesh pp=16,dp_shard=128,tp=8 --metadata-only", ""},
                 {"reshard synth bad --model llama3-70b --to hf --headers-only --shape "
                  "model.embed_tokens.weight=16064x8192",
                  ""}});
  line.description(
      "Each value is a function of the tensor's name and the element's position, so the same model comes out for every "
      "mesh and naming: reshard verify one --against another succeeds.");
  line.action([options] { return synth(*options); });
}

}  // namespace reshard::tools

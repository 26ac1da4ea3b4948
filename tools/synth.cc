// reshard synth.
#include <array>
#include <chrono>
#include <cstdio>

#include "lib/base/text.h"
#include "lib/reshard/pattern_source.h"
#include "tools/commands.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

struct Model {
  std::string_view name;
  Index vocab, hidden, layers, heads, key_value_heads, intermediate;
};

// meta-llama's published sizes, with heads of their own where the 1B ties its head to the embedding.
constexpr std::array<Model, 5> kModels = {{
    {"llama3-tiny", 512, 128, 2, 16, 8, 384},
    {"llama3-1b", 128256, 2048, 16, 32, 8, 8192},
    {"llama3-8b", 128256, 4096, 32, 32, 8, 14336},
    {"llama3-70b", 128256, 8192, 80, 64, 8, 28672},
    {"llama3-405b", 128256, 16384, 126, 128, 8, 53248},
}};

struct SynthOptions {
  std::string destination, model, mesh, names = "torchtitan", dtype = "bfloat16";
  Index layers = 0;
  bool optimizer = false, metadata_only = false, force = false;
  ResourceOptions resources;
};

Result<Model> find_model(const SynthOptions& options) {
  std::vector<std::string> names;
  for (Model m : kModels) {
    if (options.layers > 0) m.layers = options.layers;
    if (m.name == options.model) return m;
    names.emplace_back(m.name);
  }
  return usage_error("'" + printable(options.model) + "' is not a model; there are " + join(names, ", "));
}

Result<Names> find_names(const std::string& text) {
  if (text == "hf") return Names::kHf;
  if (text == "torchtitan") return Names::kTorchtitan;
  if (text == "torchtitan-2026") return Names::kTorchtitan2026;
  return usage_error("'" + printable(text) + "' are no names; there are hf, torchtitan, torchtitan-2026");
}

Result<DType> find_dtype(const std::string& text) {
  const auto dtype = dtype_from_torch(text);
  if (dtype && is_floating(*dtype) && *dtype != DType::kFloat64) return *dtype;
  return usage_error("'" + printable(text) + "' is no dtype for a model; there are float32, bfloat16, float16");
}

Json config_json(const Model& m, DType dtype) {
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

// The model under its canonical names, and Adam's state of each parameter if asked.
Result<Catalog> model_catalog(const ModelConfig& config, DType dtype, bool optimizer) {
  Catalog catalog;
  const auto add = [&](std::string name, DType type, const Dims& shape) {
    Tensor tensor;
    tensor.name = std::move(name);
    tensor.dtype = type;
    tensor.shape = shape;
    return catalog.add(std::move(tensor));
  };
  for (const Parameter& p : TRY(parameters(kLlamaFamily, config))) {
    TRY(add(p.name, dtype, p.shape));
    if (!optimizer) continue;
    for (const std::string_view moment : {".exp_avg", ".exp_avg_sq"})
      TRY(add("optimizer.state." + p.name + std::string(moment), DType::kFloat32, p.shape));
    TRY(add("optimizer.state." + p.name + ".step", DType::kFloat32, {}));
  }
  catalog.sort_by_name();
  return catalog;
}

// A target's metadata without its data files.
class MetadataOnly : public Target {
 public:
  explicit MetadataOnly(const Target& whole) : whole_(whole) { catalog_.files = {whole.catalog().files.back()}; }
  bool wants_crcs() const override { return false; }
  Status seal(const PayloadCrc&, const EmitBytes& emit) const override {
    const auto last = static_cast<std::uint32_t>(whole_.catalog().files.size() - 1);
    const PayloadCrc no_payload = [](const Extent&) { return 0u; };
    return whole_.seal(no_payload, [&](std::uint32_t file, Index offset, Bytes bytes) -> Status {
      return file == last ? emit(0, offset, bytes) : Status();
    });
  }

 private:
  const Target& whole_;
};

Result<std::unique_ptr<Target>> lay_out(const Catalog& model, const ModelConfig& config, const SynthOptions& options) {
  LayoutRequest request;
  if (!options.mesh.empty()) request.mesh = TRY(Mesh::parse(options.mesh));
  const Names names = TRY(find_names(options.names));
  const Placer placer = TRY(Placer::make(request.mesh, &kLlamaFamily, &config, model));
  for (const Tensor& t : model.tensors())
    request.tensors.push_back({rename_key(kLlamaFamily, t.name, names), t.dtype, t.shape, {}, placer.place(t)});
  const Format* format = TRY(find_format("dcp"));
  return format->lay_out(std::move(request));
}

Result<int> synth(const SynthOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const DType dtype = TRY(find_dtype(options.dtype));
  const Json config_file = config_json(TRY(find_model(options)), dtype);
  const ModelConfig config = TRY(ModelConfig::parse(config_file, "config.json"));
  RunOptions run = TRY(options.resources.run_options());
  PatternSource source(TRY(model_catalog(config, dtype, options.optimizer)));
  const auto target = TRY(lay_out(source.catalog(), config, options));
  const bool quiet = options.resources.quiet;
  Index fragments = 0;
  for (const Tensor& t : target->catalog().tensors()) fragments += static_cast<Index>(t.fragments.size());
  if (!quiet) {
    print_row("model", options.model + "   " + with_commas(static_cast<Index>(source.catalog().tensors().size())) +
                           " tensors, " + human_bytes(source.catalog().tensor_bytes()) + " in " +
                           with_commas(fragments) + " shards");
    std::fflush(stdout);
  }

  const MetadataOnly metadata(*target);
  const Target& written = options.metadata_only ? static_cast<const Target&>(metadata) : *target;
  auto output = TRY(Output::create(options.destination, written, options.force));
  if (!options.metadata_only) {
    // Made in the canonical order of rows, so that the same model comes out whatever the names and the mesh.
    const Catalog view = TRY(canonical_view(target->catalog(), {&kLlamaFamily, &config, true, false}, nullptr));
    const Plan plan = TRY(make_plan(source.catalog(), view));
    Progress progress("writing", plan.bytes_written, quiet);
    run.progress = [&](Index done) { progress.update(done); };
    TRY(copy_tensors(plan, source, view, *output, run));
  }
  TRY(output->add_file("config.json", to_text(config_file, 2) + "\n"));
  TRY(output->commit());
  if (quiet) return 0;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_row("done",
            options.destination + "   " + human_seconds(seconds) + "   peak memory " + human_bytes(peak_memory()));
  return 0;
}

}  // namespace

void add_synth(CLI::App& app, Action& action) {
  auto options = std::make_shared<SynthOptions>();
  app.add_option("DST", options->destination, "The directory to make")->required();
  app.add_option("--model", options->model, "llama3-tiny (1 MB), llama3-1b, llama3-8b, llama3-70b, llama3-405b")
      ->required();
  app.add_option("--mesh", options->mesh, "The mesh that saves it, e.g. tp=8,dp_shard=2,pp=2 (default: one rank)");
  app.add_option("--names", options->names, "Tensor names: torchtitan (until April 2026), torchtitan-2026, hf")
      ->capture_default_str();
  app.add_option("--dtype", options->dtype, "Of the model's tensors: float32, bfloat16, float16")
      ->capture_default_str();
  app.add_option("--layers", options->layers, "Layers, instead of the model's own number")
      ->check(CLI::Range(1, 10'000));
  app.add_flag("--optimizer", options->optimizer, "Add Adam's state: exp_avg, exp_avg_sq, step of each parameter");
  app.add_flag("--metadata-only", options->metadata_only, "Write .metadata and config.json, no data files");
  app.add_flag("--force", options->force, "Replace the destination if it is a checkpoint");
  options->resources.add(app);
  app.footer(
      "Examples:\n"
      "  reshard synth tiny --model llama3-tiny --mesh tp=2,dp_shard=2       1 MB in four files\n"
      "  reshard synth step-0 --model llama3-1b --mesh tp=8 --optimizer      18 GB, as a training run leaves it\n"
      "  reshard synth big --model llama3-405b --mesh pp=16,dp_shard=128,tp=8 --metadata-only\n"
      "Values are made up, and the same for every mesh and naming: reshard verify one --against another holds.");
  app.callback([options, &action] { action = [options] { return synth(*options); }; });
}

}  // namespace reshard::tools

#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class TreeAttention : public Operator {
  public:
    OPENVINO_OP("TreeAttention", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() >= 11 && get_input_size() <= 14, get_friendly_name(), " has ",
                        get_input_size(), " inputs: expected 11, 1 more with starts, 2 more with norms");
        for (std::size_t input : {0, 8}) expect_type(this, input, ov::element::f32);
        for (std::size_t input : {1, 2, 3, 4, 5, 6, 7}) expect_type(this, input, ov::element::i32);
        if (has_starts(get_input_size())) expect_type(this, 11, ov::element::i32);
        for (std::size_t norm = 1; has_norms(get_input_size()) && norm <= 2; ++norm) {
            expect_type(this, get_input_size() - norm, ov::element::f32);
            expect_elements(this, get_input_size() - norm, head_size_);
        }
        // u8: the bytes of bf16, which a CPU without AVX-512 would have converted to f32, in a copy.
        const ov::element::Type cache = get_input_element_type(9);
        OPENVINO_ASSERT((cache == ov::element::f32 || cache == ov::element::u8) && cache == get_input_element_type(10),
                        get_friendly_name(), ": the caches are ", cache, " and ", get_input_element_type(10),
                        ": expected f32, or u8 for bf16");
        const ov::PartialShape& qkv = get_input_partial_shape(0);
        const ov::Dimension rows = qkv.rank().is_static() ? qkv[0] : ov::Dimension::dynamic();
        set_output_type(0, ov::element::f32, {rows, num_heads_ * head_size_});
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<TreeAttention>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("num_heads", num_heads_);
        visitor.on_attribute("num_kv_heads", num_kv_heads_);
        visitor.on_attribute("head_size", head_size_);
        visitor.on_attribute("window", window_);
        visitor.on_attribute("norm_eps", norm_eps_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const std::size_t rows = inputs[0].get_shape()[0];
        outputs[0].set_shape({rows, static_cast<std::size_t>(num_heads_ * head_size_)});
        const auto ints = [&](int i) { return inputs[i].data<const int32_t>(); };
        const ov::Shape& cache = inputs[9].get_shape();
        const bool bf16 = inputs[9].get_element_type() == ov::element::u8;
        const int64_t row = bf16 ? 2 * head_size_ : head_size_;
        OPENVINO_ASSERT(cache.size() == 4 && cache == inputs[10].get_shape() &&
                            cache[1] == static_cast<std::size_t>(num_kv_heads_) &&
                            cache[3] == static_cast<std::size_t>(row),
                        "the caches have shapes ", cache, " and ", inputs[10].get_shape(), ": expected [slots, ",
                        num_kv_heads_, ", rows, ", row, "]");
        const TreeAttentionArgs args{inputs[0].data<const float>(),
                                     static_cast<int64_t>(rows),
                                     ints(1),
                                     ints(2),
                                     static_cast<int64_t>(inputs[2].get_size()) - 1,
                                     ints(3),
                                     ints(4),
                                     ints(5),
                                     static_cast<int64_t>(inputs[5].get_shape()[1]),
                                     ints(6),
                                     static_cast<int64_t>(inputs[6].get_size()),
                                     inputs[7].get_size() ? ints(7) : nullptr,
                                     has_starts(inputs.size()) ? ints(11) : nullptr,
                                     inputs[8].data<const float>(),
                                     static_cast<int64_t>(inputs[8].get_shape()[0]),
                                     const_cast<void*>(inputs[9].data()),
                                     const_cast<void*>(inputs[10].data()),
                                     bf16 ? DType::bf16 : DType::fp32,
                                     static_cast<int64_t>(cache[0]),
                                     static_cast<int64_t>(cache[2]),
                                     num_heads_,
                                     num_kv_heads_,
                                     head_size_,
                                     window_,
                                     has_norms(inputs.size()) ? inputs[inputs.size() - 2].data<const float>() : nullptr,
                                     has_norms(inputs.size()) ? inputs[inputs.size() - 1].data<const float>() : nullptr,
                                     norm_eps_,
                                     outputs[0].data<float>()};
        run_kernel(args);
    }

  private:
    static bool has_starts(std::size_t inputs) { return inputs % 2 == 0; }
    static bool has_norms(std::size_t inputs) { return inputs > 12; }

    int64_t num_heads_ = 0, num_kv_heads_ = 0, head_size_ = 0, window_ = 0;
    float norm_eps_ = 0;
};

}  // namespace redraft
